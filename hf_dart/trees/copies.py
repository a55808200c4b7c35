"""Copies of earlier text: what followed the longest earlier match of a text's end, as draft tokens.

The idea is prompt lookup decoding (Saxena, 2023; stock's `prompt_lookup_num_tokens`). There the copied chain is the
whole draft; here its tokens compete with the drafter's for places in the tree, by how often copies of that match length
have come true in this very call.

One rule in two forms: `RowLookup` for one text that is a list on the host, and `BatchLookup` for the texts of a batch
in tensors of fixed size, which reads nothing back. On a CPU (600 tokens, one thread, one run) the tensors take 71 times
as long as the list for one row, 34 times for four; on an accelerator the list would have to be read back each round.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log

import numpy as np
import torch
from torch import Tensor

from hf_dart.trees.costs import RoundCost

NGRAM = 2  # shortest match
LONGEST = 32  # matches are not told apart beyond this length
TRIED = 8  # latest earlier occurrences that are compared
WORTH = 0.02  # a copied token less likely than this to survive is not proposed
# Chance that the next copied token is right, by match length 2, 3, 4, 5-7, 8-15, 16 and more, before
# anything was seen, and how many observations that belief is worth.
BUCKETS = (3, 4, 5, 8, 16)
PRIOR = (0.35, 0.5, 0.6, 0.7, 0.8, 0.9)
PRIOR_WEIGHT = 8.0

Copy = tuple[list[int], float]
"""Copied tokens, and the log-probability of each to be right after the one before."""


class RowLookup:
    """What followed the longest suffix of one text that occurred before in it.

    Args:
        tokens: the row's token ids; the list is shared and grows from outside.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._indexed = NGRAM - 1
        self._copied: list[int] = []
        self._bucket = 0
        self._asked_at = 0
        self._right = [chance * PRIOR_WEIGHT for chance in PRIOR]
        self._seen = [PRIOR_WEIGHT] * len(PRIOR)

    def suggest(self, length: int) -> Copy:
        """Up to `length` tokens that followed the longest match, and the log-probability of each to be right."""
        self._learn()
        self._index()
        tokens, ends = self._tokens, len(self._tokens)
        best, best_end = 0, 0
        for end in reversed(self._ends.get(tuple(tokens[-NGRAM:]), [])[-TRIED:]):
            matched = NGRAM
            while matched < min(LONGEST, end) and tokens[end - 1 - matched] == tokens[ends - 1 - matched]:
                matched += 1
            if matched > best:
                best, best_end = matched, end
        self._copied = []
        self._asked_at = ends
        if best == 0:
            return [], -inf
        self._bucket = sum(best >= bound for bound in BUCKETS)
        chance = self._right[self._bucket] / self._seen[self._bucket]
        for offset in range(length):
            if chance ** (offset + 1) < WORTH:
                break
            source = best_end + offset
            # A match that reaches into the present goes on with its own copy: the text is in a loop.
            self._copied.append(tokens[source] if source < ends else self._copied[source - ends])
        return self._copied, log(chance)

    def _index(self) -> None:
        """Note every n-gram that something follows, by where it ends."""
        for end in range(self._indexed + 1, len(self._tokens)):
            self._ends.setdefault(tuple(self._tokens[end - NGRAM : end]), []).append(end)
        self._indexed = max(self._indexed, len(self._tokens) - 1)

    def _learn(self) -> None:
        """Compare the last suggestion with what came."""
        came = self._tokens[self._asked_at :]
        for copied, token in zip(self._copied, came, strict=False):
            self._seen[self._bucket] += 1
            if copied != token:
                break
            self._right[self._bucket] += 1


class BatchLookup:
    """The texts of B rows in tensors for up to T tokens, and copies in them by the rule of `RowLookup`.

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
        """[B, count] the last tokens; -1 before the beginning of a text."""
        places = self.lengths[:, None] - count + torch.arange(count, device=self.lengths.device)
        return self.tokens.gather(1, places.clamp(min=0)).masked_fill(places < 0, -1)

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Add the first `counts` [B] of `tokens` [B, A] to each row."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        if self._copied.shape[1]:
            self._learn(tokens, counts, steps)
        # What lies after a row's end is overwritten by the next ones.
        self.tokens.scatter_(1, (self.lengths[:, None] + steps).clamp(max=self.tokens.shape[1] - 1), tokens)
        self.lengths.add_(counts)

    def _learn(self, tokens: Tensor, counts: Tensor, steps: Tensor) -> None:
        """Compare the last suggestion with the tokens that came."""
        width = min(tokens.shape[1], self._copied.shape[1])
        compared = self._counts.minimum(counts)
        alike = (self._copied[:, :width] == tokens[:, :width]) & (steps[:width] < compared[:, None])
        right = alike.long().cumprod(-1).sum(-1)
        row = self._buckets[:, None]
        self._right.scatter_add_(1, row, right[:, None].to(self._right.dtype))
        self._seen.scatter_add_(1, row, compared.minimum(right + 1)[:, None].to(self._seen.dtype))

    def suggest(self) -> tuple[Tensor, Tensor]:
        """Tokens [B, L] that followed the longest match in each row, and the log-probability of each to be right.

        They are -1 and -inf after the end of a row's copy.
        """
        end = torch.arange(self.tokens.shape[1], device=self.tokens.device)  # of an earlier match, exclusive
        before = torch.nn.functional.pad(self.tokens, (LONGEST, 0), value=-1).unfold(1, LONGEST, 1)[:, : len(end)]
        suffix = self.last(LONGEST)
        alike = (before == suffix[:, None]) & (suffix >= 0)[:, None]  # [B, T, LONGEST]
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
        return torch.where(worth, copied, -1), torch.where(worth, chance.log()[:, None], -inf).float()


def best_depth(copies: Sequence[Copy], weights: Sequence[float], cost: RoundCost) -> tuple[int, float, float]:
    """Depth at which a round that verifies copies and nothing else brings most for its cost.

    Args:
        copies: of each row.
        weights: of the rows' tokens.
        cost: of a round without a draft.

    Returns:
        The depth, at most N - 1 for a tree of N nodes, 0 for none; the expected tokens, weighted; and the cost.
    """
    longest = min(max(len(tokens) for tokens, _ in copies), len(cost.verify) - 1)
    expected = np.full(longest + 1, float(sum(weights)))
    for weight, (tokens, chance) in zip(weights, copies, strict=True):
        depths = np.arange(1, longest + 1)
        expected[1:] += np.where(depths <= len(tokens), weight * np.exp(chance * depths), 0.0).cumsum()
    costs = cost.of_each(longest + 1) + cost.level * np.arange(longest + 1)
    depth = longest - int((expected / costs)[::-1].argmax())  # the deepest of the best
    return depth, float(expected[depth]), float(costs[depth])


def padded(copies: Sequence[Copy]) -> tuple[Tensor, Tensor]:
    """What `RowLookup.suggest` found for each of B rows, as tokens [B, L] and the log-probability [B, L] of each.

    After the end of a row's copy they are -1 and -inf.
    """
    longest = max(len(copied) for copied, _ in copies)
    tokens, chances = np.full((len(copies), longest), -1), np.full((len(copies), longest), -inf)
    for row, (copied, chance) in enumerate(copies):
        tokens[row, : len(copied)] = copied
        chances[row, : len(copied)] = chance
    return torch.from_numpy(tokens), torch.from_numpy(chances)


def up_to_end(copied: Tensor, chances: Tensor, ending: Tensor) -> tuple[Tensor, Tensor]:
    """Copied tokens [B, L] and their log-probabilities [B, L] up to the first one in each row that ends the text.

    Args:
        ending: [B, L] which do.
    """
    after = ending.cumsum(1) > ending.long()
    return copied.masked_fill(after, -1), chances.masked_fill(after, -inf)


def with_copies(candidates: Tensor, scores: Tensor, copied: Tensor) -> tuple[Tensor, Tensor]:
    """Make the copied token of each depth one more candidate, unless it is one already.

    Args:
        candidates, scores: [B, d, K] of the drafter.
        copied: [B, L] copied tokens; those beyond d are left out.

    Returns:
        Both as [B, d, K + 1]. The candidate that was added scores -inf; -1 is none.
    """
    depth = candidates.shape[1]
    copied = copied[:, :depth, None]
    more = torch.where((candidates[:, : copied.shape[1]] == copied).any(-1, keepdim=True), -1, copied)
    more = torch.nn.functional.pad(more, (0, 0, 0, depth - copied.shape[1]), value=-1)
    return torch.cat([candidates, more], dim=-1), torch.nn.functional.pad(scores, (0, 1), value=-inf)
