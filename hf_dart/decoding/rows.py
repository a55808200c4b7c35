"""The rows of a batch as they grow: tokens, who is finished, what a streamer may see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria

from hf_dart.decoding.request import Request
from hf_dart.drafters.base import Verified, entries_of
from hf_dart.models.devices import users_default

_ROOM = 512  # tokens after the prompt that there is room for at first


class Rows:
    """Token ids of B rows of different lengths, in stock's slots (left padding included), as a `Request` begins them.

    Attributes:
        prompt_length: P, slots of the prompt.
        max_length: P and the tokens that a row may have after it.
        fills_up: are ended rows filled up with pads, as stock does where an end token is a criterion? Else they run on.
        pad: the token that they are filled up with.
        emitted: tokens generated so far, per row.
        tokens: the text of each row so far as a list of ids, padding left out.
        eos: end tokens: each ends its row.
        in_step: all rows are of one length at any time, ended ones too (`append_all` instead of `append`).
    """

    def __init__(self, request: Request) -> None:
        input_ids, self._criteria = request.input_ids, request.criteria
        batch, self.prompt_length = input_ids.shape
        self.max_length, self.in_step = request.max_length, request.in_step
        self._streamer, self._sent, self._sending = request.streamer, 0, False
        pad = request.generation_config._pad_token_tensor
        self.fills_up = any(hasattr(criterion, "eos_token_id") for criterion in self._criteria)
        if self.fills_up and pad is None:  # stock fails too, at its first step
            raise TypeError("Rows that have ended are filled up with pads; give pad_token_id.")
        self.pad = 0 if pad is None else int(pad)
        # Rows that end early are filled with the pad token, exactly as stock fills them.
        self._ids = input_ids.new_full((batch, min(self.max_length, self.prompt_length + _ROOM)), self.pad)
        self._ids[:, : self.prompt_length] = input_ids
        self.emitted = [0] * batch
        first = request.first_slot
        self.tokens = [ids[max(pad - first, 0) :] for ids, pad in zip(input_ids.tolist(), request.pads, strict=True)]
        self._stopped_at: list[int | None] = [None] * batch
        self._met = input_ids.new_zeros(batch, dtype=torch.bool)  # [B, ...] as criteria return it: a row ends by all
        known = [criterion for criterion in self._criteria if type(criterion) is EosTokenCriteria]
        self.eos = {int(token) for criterion in known for token in criterion.eos_token_id}
        # Nothing but these tokens and the length ends a row; else criteria have a say.
        self._known = all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in self._criteria)

    @property
    def device(self) -> torch.device:
        """Device of the token ids."""
        return self._ids.device

    def __len__(self) -> int:
        return len(self.emitted)

    @property
    def steps(self) -> int:
        """Number of positions that stock has generated once every row has finished."""
        return max(stop for stop in self._stopped_at if stop is not None)

    @property
    def common(self) -> int:
        """Number of positions that all rows which have not ended have generated."""
        return self.steps if self.finished else self.slowest()

    @property
    def finished(self) -> bool:
        """True if every row has met a stopping criterion and is as long as the longest one needs."""
        return not any(self.active(row) for row in range(len(self)))

    def active(self, row: int) -> bool:
        """Return True if the row still generates. Without an EOS criterion stock keeps every row going to the end."""
        stopped = self._stopped_at[row]
        if stopped is None:
            return True
        if self.fills_up and not self.in_step:
            return False
        stops = [stop for stop in self._stopped_at if stop is not None]
        return len(stops) < len(self) or self.emitted[row] < max(stops)

    @property
    def ended(self) -> list[bool]:
        """True for each row that has met a stopping criterion, also if it runs on."""
        return [stop is not None for stop in self._stopped_at]

    def slowest(self) -> int:
        """Tokens emitted by the slowest row that still generates."""
        return min(n for row, n in enumerate(self.emitted) if self.active(row))

    def room(self, row: int) -> int:
        """Tokens that the row may still emit."""
        return self.max_length - self.prompt_length - self.emitted[row]

    @property
    def rooms(self) -> list[int]:
        """Tokens that each row may still emit; 0 where it has ended."""
        return [self.room(row) if self.active(row) else 0 for row in range(len(self))]

    def ids(self, row: int) -> Tensor:
        """[1, n] ids of one row so far."""
        return self._ids[row : row + 1, : self.prompt_length + self.emitted[row]]

    def text(self, row: int) -> list[int]:
        """Token ids of one row so far, padding left out, up to where it has ended."""
        return self.tokens[row][: len(self.tokens[row]) - self.past_end(row)]

    def past_end(self, row: int) -> int:
        """Tokens of one row that came after its end."""
        stop = self._stopped_at[row]
        return 0 if stop is None else self.emitted[row] - stop

    def ids_in_step(self) -> Tensor:
        """[B, n] a copy of the ids of all rows, which are of one length; contiguous, as stock's are."""
        return self._ids[:, : self.prompt_length + self.emitted[0]].clone(memory_format=torch.contiguous_format)

    def take_over(self, ids: Tensor) -> None:
        """Take over the ids [B, n] of all rows, into which a processor or a criterion may have written.

        As in stock's loop, the target goes on from what it has read; the text, and a last token that it has yet to
        read, are the new ones.
        """
        held = self._ids[:, : ids.shape[1]]
        if not torch.equal(held, ids):
            held.copy_(ids)
            for text, written in zip(self.tokens, ids.tolist(), strict=True):
                text[:] = written[-len(text) :]

    def recent(self, counts: list[int], width: int) -> Tensor:
        """[B, width] the last `counts[b]` tokens of each row, then its last one again (a pad may be no token)."""
        rows = zip(self.tokens, counts, strict=True)
        recent = [text[len(text) - count :] + text[-1:] * (width - count) for text, count in rows]
        return torch.tensor(recent, device=self._ids.device)

    def take(self, features: Tensor, path: Tensor, counts: list[int]) -> Verified:
        """Return the positions that a round has verified, each with the token after it.

        Of a tree with `features` [B, N, F] they are the first `counts[b]` nodes of each row's `path` [B, A].
        """
        width = max(1, *counts)
        if features.shape[1] > 1:
            features = entries_of(features, path[:, :width])
        return Verified(features, self.recent(counts, width), torch.tensor(counts))

    def without_pads(self, counts: list[int]) -> list[int]:
        """Return how many of the last `counts[b]` tokens of each row do not fill it up after its end."""
        return [max(count - self.past_end(row), 0) for row, count in enumerate(counts)] if self.fills_up else counts

    def _reserve(self, column: int) -> int:
        """Make room for `column`, which is returned."""
        room = self._ids.shape[1]
        if column >= room:
            grown = self._ids.new_full((len(self), min(self.max_length, max(2 * room, column + 1))), self.pad)
            grown[:, :room] = self._ids
            self._ids = grown
        return column

    def append(self, row: int, token: int) -> bool:
        """Add a token to a row; False if the row ends with it."""
        column = self._reserve(self.prompt_length + self.emitted[row])
        self._ids[row, column] = token
        self.tokens[row].append(token)
        self.emitted[row] += 1
        if self._stopped_at[row] is None and self._stops(row, token):
            self._stopped_at[row] = self.emitted[row]
        return self.active(row)

    def _stops(self, row: int, token: int) -> bool:
        if self._known:
            return token in self.eos or self.room(row) <= 0
        return bool(self._criteria(self.ids(row), None)[0])

    def append_all(self, tokens: Tensor, scores: Any) -> Tensor:
        """Add a token [B] to every row and ask the criteria once, as stock does; return the ids [B, n] as they left it.

        Rows that have ended get a pad instead where stock pads. `scores` are what stock shows to criteria.
        """
        column = self._reserve(self.prompt_length + self.emitted[0])
        if self.fills_up:
            if self._met.ndim > 1:  # stock fails too
                raise ValueError("Stopping criteria of shape [rows, 1] take no end token beside them; return [rows].")
            tokens = tokens.masked_fill(torch.tensor(self.ended, device=self.device), self.pad)
        self._ids[:, column] = tokens
        for row, token in enumerate(tokens.tolist()):
            self.tokens[row].append(token)
            self.emitted[row] += 1
        ids = self.ids_in_step()
        with users_default():
            self._met = self._met | self._criteria(ids, scores)
        for row, stops in enumerate(self._met.reshape(len(self), -1).all(1).tolist()):
            if stops and self._stopped_at[row] is None:
                self._stopped_at[row] = self.emitted[row]
        return ids

    def sequences(self) -> Tensor:
        """[B, P + steps] prompt and generated tokens, short rows padded, as stock returns them."""
        return self._ids[:, : self.prompt_length + self.steps].clone()

    def send(self) -> None:
        """Put what is new to the streamer, position by position, as far as all rows have come."""
        if self._streamer is None:
            return
        self._sending = True
        for position in range(self._sent, self.common):
            self._sent = position + 1
            rows = zip(self.tokens, self.emitted, strict=True)
            tokens = [text[position - emitted] if position < emitted else self.pad for text, emitted in rows]
            shown = torch.tensor(tokens, dtype=self._ids.dtype)
            with users_default():
                self._streamer.put(shown)
        self._sending = False

    @property
    def position(self) -> int:
        """Number of tokens per row that stock would have generated by now, the one that is just being put included."""
        return self._sent if self._sending else self.common
