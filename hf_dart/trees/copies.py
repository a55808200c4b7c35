"""Copies of earlier text: what followed the longest earlier match of a text's end, as draft tokens.

The idea is prompt lookup decoding (Saxena, 2023; stock's `prompt_lookup_num_tokens`). There the copied chain is the
whole draft; here its tokens compete with the drafter's for places in the tree, by how often copies of that match length
were accepted in this very call.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log

import numpy as np
import torch
from torch import Tensor

from hf_dart.trees.costs import Array, RoundCost

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
    """Copies in one text: the tokens that followed the longest suffix that occurred before in it.

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
        """Return up to `length` tokens that followed the longest match, and the log-probability of each to be right."""
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
            # A match that reaches the end of the text continues with its own copy: the text is in a loop.
            self._copied.append(tokens[source] if source < ends else self._copied[source - ends])
        return self._copied, log(chance)

    def _index(self) -> None:
        """Note every n-gram that something follows, by where it ends."""
        for end in range(self._indexed + 1, len(self._tokens)):
            self._ends.setdefault(tuple(self._tokens[end - NGRAM : end]), []).append(end)
        self._indexed = max(self._indexed, len(self._tokens) - 1)

    def _learn(self) -> None:
        """Compare the last suggestion with the tokens that followed."""
        followed = self._tokens[self._asked_at :]
        for copied, token in zip(self._copied, followed, strict=False):
            self._seen[self._bucket] += 1
            if copied != token:
                break
            self._right[self._bucket] += 1


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


def padded(copies: Sequence[Copy]) -> tuple[Array, Array]:
    """Return copies of B rows as tokens [B, L] and the log-probability [B, L] of each.

    After the end of a row's copy they are -1 and -inf.

    Args:
        copies: of each row, from `RowLookup.suggest`.
    """
    longest = max(len(copied) for copied, _ in copies)
    tokens, chances = np.full((len(copies), longest), -1), np.full((len(copies), longest), -inf)
    for row, (copied, chance) in enumerate(copies):
        tokens[row, : len(copied)] = copied
        chances[row, : len(copied)] = chance
    return tokens, chances


def up_to_end(copied: Array, chances: Array, ending: Array) -> tuple[Array, Array]:
    """Cut copied tokens [B, L] and their log-probabilities [B, L] after the first in each row that ends the text.

    Args:
        ending: [B, L] bool, tokens that end the text.
    """
    after = ending.cumsum(1) > ending
    return np.where(after, -1, copied), np.where(after, -inf, chances)


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
