"""What each row says so far, on the device: contexts for n-grams, and copies of earlier text (`hf_dart.lookup`)."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from hf_dart.lookup import BUCKETS, LONGEST, NGRAM, PRIOR, PRIOR_WEIGHT, TRIED, WORTH, Graft


class FixedText:
    """The texts of B rows, of up to T tokens.

    Args:
        batch, slots: B and T, with room for what a round adds.
        copied: L, the longest copy that is suggested; 0 for none.

    Attributes:
        tokens: [B, T].
        lengths: [B] how many there are.
    """

    def __init__(self, batch: int, slots: int, copied: int, device: torch.device) -> None:
        self.tokens = torch.zeros(batch, slots, dtype=torch.long, device=device)
        self.lengths = torch.ones(batch, dtype=torch.long, device=device)
        # What was suggested last, as far as it goes, and how long a match it followed.
        self._copied = torch.zeros(batch, copied, dtype=torch.long, device=device)
        self._counts = torch.zeros_like(self.lengths)
        self._buckets = torch.zeros_like(self.lengths)
        self._right = torch.zeros(batch, len(PRIOR), dtype=torch.float64, device=device)
        self._seen = torch.zeros_like(self._right)
        self._prior = torch.tensor(PRIOR, dtype=torch.float64, device=device) * PRIOR_WEIGHT
        self._bounds = torch.tensor(BUCKETS, device=device)

    def load(self, texts: list[list[int]]) -> None:
        """Begin with these; what copies were worth is not known yet."""
        for row, text in enumerate(texts):
            self.tokens[row, : len(text)] = torch.tensor(text, dtype=torch.long)
        self.lengths.copy_(torch.tensor([len(text) for text in texts]))
        self._counts.zero_()
        self._right.copy_(self._prior)
        self._seen.fill_(PRIOR_WEIGHT)

    def last(self, count: int) -> Tensor:
        """[B, count] the last tokens; -1 in front of a text."""
        places = self.lengths[:, None] - count + torch.arange(count, device=self.lengths.device)
        return self.tokens.gather(1, places.clamp(min=0)).masked_fill(places < 0, -1)

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Add the first `counts` [B] of `tokens` [B, A] to each row."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        if self._copied.shape[1]:
            self._learn(tokens, counts, steps)
        # What lies behind a row's end is overwritten by the next ones.
        self.tokens.scatter_(1, (self.lengths[:, None] + steps).clamp(max=self.tokens.shape[1] - 1), tokens)
        self.lengths.add_(counts)

    def _learn(self, tokens: Tensor, counts: Tensor, steps: Tensor) -> None:
        """As `RowLookup` compares its last suggestion with what came."""
        width = min(tokens.shape[1], self._copied.shape[1])
        compared = self._counts.minimum(counts)
        alike = (self._copied[:, :width] == tokens[:, :width]) & (steps[:width] < compared[:, None])
        right = alike.long().cumprod(-1).sum(-1)
        row = self._buckets[:, None]
        self._right.scatter_add_(1, row, right[:, None].to(self._right.dtype))
        self._seen.scatter_add_(1, row, compared.minimum(right + 1)[:, None].to(self._seen.dtype))

    def copies(self) -> Graft:
        """What `RowLookup.suggest` finds for each row, no longer than L."""
        end = torch.arange(self.tokens.shape[1], device=self.tokens.device)  # of an earlier match, exclusive
        in_front = torch.nn.functional.pad(self.tokens, (LONGEST, 0), value=-1).unfold(1, LONGEST, 1)[:, : len(end)]
        suffix = self.last(LONGEST)
        alike = (in_front == suffix[:, None]) & (suffix >= 0)[:, None]  # [B, T, LONGEST]
        matched = alike.flip(-1).cumprod(-1, dtype=torch.int32).sum(-1)
        found = (matched >= NGRAM) & (end < self.lengths[:, None])
        found = found & (found.flip(-1).cumsum(-1).flip(-1) <= TRIED)
        # The longest match, the latest among equals.
        best = torch.where(found, matched * len(end) + end, -1).argmax(-1)
        length = matched.gather(1, best[:, None])
        bucket = (length >= self._bounds).sum(-1)
        chance = (self._right.gather(1, bucket[:, None]) / self._seen.gather(1, bucket[:, None]))[:, 0]
        offsets = torch.arange(self._copied.shape[1], device=end.device)
        # A match that reaches into the present goes on with its own copy: the text is in a loop.
        period = (self.lengths - best).clamp(min=1)
        copied = self.tokens.gather(1, best[:, None] + offsets % period[:, None])
        worth = (chance[:, None] ** (offsets + 1) >= WORTH) & found.any(-1, keepdim=True)
        self._copied.copy_(copied)
        self._counts.copy_(worth.sum(-1))
        self._buckets.copy_(bucket)
        return Graft(copied, torch.where(worth, chance.log()[:, None], -inf).float())
