"""Input and output of a drafter: `Verified` positions, a `Proposal`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hf_dart.trees.vocabulary import columns_of

AT_ONCE = 512
"""Positions that a drafter takes in at once: its masks grow with them, times all positions before."""

# A logit next to which all others vanish, in any float type.
_CERTAIN = 1e4

Score = Callable[[int, Tensor], Tensor]
"""Function from a depth (from 0) and logits [B, W, V] of W branches to log-scores [B, W, V] that rank the tree."""


class Verified(NamedTuple):
    """Verified positions of all rows, as `Drafter.extend` takes them in.

    Attributes:
        features: [B, A, F] hidden states of the target at `Drafter.feature_layers`, concatenated.
        next_tokens: [B, A] the token after each position; [B, A, E] its embedding where the prompt was given as
            `inputs_embeds`.
        counts: [B] how many of the A entries of a row are real.
    """

    features: Tensor
    next_tokens: Tensor
    counts: Tensor

    def parts(self, size: int | None = None) -> Iterator[Verified]:
        """Yield the same positions in parts of `size` entries (`AT_ONCE` if left out)."""
        size = size or AT_ONCE
        for first in range(0, self.next_tokens.shape[1], size):
            features, tokens = (part[:, first : first + size] for part in self[:2])
            yield Verified(features, tokens, (self.counts - first).clamp(0, tokens.shape[1]))

    def split(self, size: int = AT_ONCE) -> tuple[Verified, Verified]:
        """Split off the last `size` entries of each row: the entries before them, and those last ones."""
        features, tokens, counts = self
        before = (counts - size).clamp(min=0)
        width = int(before.max())
        last = before[:, None] + torch.arange(tokens.shape[1] - width, device=before.device)
        ahead = Verified(features[:, :width], tokens[:, :width], before)
        return ahead, Verified(entries_of(features, last), entries_of(tokens, last), counts - before)


def entries_of(states: Tensor, entries: Tensor) -> Tensor:
    """Gather the `entries` [B, A] of each row from `states` [B, T, ...]."""
    rows = torch.arange(len(entries), device=states.device)[:, None]
    return states[rows, entries.to(states.device)]


@dataclass(frozen=True)
class Proposal:
    """One draft: distributions over the next d tokens of each row.

    Attributes:
        logits: [B, d, V], entry i for the token i + 1 places after the last committed one; [B, d, M] where the
            drafter scores some tokens only.
        hidden: [B, d, H], what the logits were read from.
        vocabulary: [M] ids of those tokens, ascending; None for all.
    """

    logits: Tensor
    hidden: Tensor
    vocabulary: Tensor | None = None

    def within(self, vocab_size: int) -> Self:
        """Fit the proposal to a target with V logits, where a drafter's own table has more or fewer padding rows."""
        rows = self.logits.shape[-1]
        if self.vocabulary is not None or rows == vocab_size:
            return self
        vocabulary = torch.arange(rows, device=self.logits.device) if rows < vocab_size else None
        return replace(self, logits=self.logits[..., :vocab_size], vocabulary=vocabulary)

    def force_token(self, rows: list[bool], token: int) -> None:
        """Let those rows draft `token` alone, if they can."""
        column = token
        if self.vocabulary is not None:
            column = int(columns_of(torch.tensor(token, device=self.vocabulary.device), self.vocabulary, -1))
        if 0 <= column < self.logits.shape[-1]:
            self.logits[torch.tensor(rows), :, column] = _CERTAIN
