"""Text that repeats itself: the continuation of the longest earlier match, grafted onto the draft tree.

The idea is prompt lookup decoding (Saxena, 2023; stock's `prompt_lookup_num_tokens`). There the copied chain
is the whole draft; here its tokens compete with the drafter's for places in the tree, by how often copies of
that match length have come true in this very call.
"""

from __future__ import annotations

from math import inf, log

import numpy as np
import torch
from torch import Tensor

from hf_dart.ngram.table import Array
from hf_dart.trees.tree import Beam

NGRAM = 2  # shortest match
LONGEST = 32  # matches are not told apart beyond this length
TRIED = 8  # latest earlier occurrences that are compared
WORTH = 0.02  # a copied token less likely than this to survive is not proposed
# Chance that the next copied token is right, by match length 2, 3, 4, 5-7, 8-15, 16 and more, before
# anything was seen, and how many observations that belief is worth.
BUCKETS = (3, 4, 5, 8, 16)
PRIOR = (0.35, 0.5, 0.6, 0.7, 0.8, 0.9)
PRIOR_WEIGHT = 8.0


class RowLookup:
    """Finds the longest suffix of one row's text that occurred before.

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

    def suggest(self, length: int) -> tuple[list[int], float]:
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
        """Remember every n-gram that something follows, by where it ends."""
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


def padded(copies: list[tuple[list[int], float]]) -> tuple[Array, Array]:
    """What `RowLookup.suggest` found for each row, as tokens [B, L] and the log-probability of each [B, L].

    Behind the end of a row's copy, -1 and -inf.
    """
    longest = max(len(copied) for copied, _ in copies)
    tokens, chances = np.full((len(copies), longest), -1), np.full((len(copies), longest), -inf)
    for row, (copied, chance) in enumerate(copies):
        tokens[row, : len(copied)] = copied
        chances[row, : len(copied)] = chance
    return tokens, chances


def with_copies(candidates: Array, copied: Array) -> Array:
    """Candidates [B, d, K + 1], of which the last is the copied one [B, L] of that depth, or -1 if it is known."""
    batch, depth, width = candidates.shape
    wide = np.full((batch, depth, width + 1), -1)
    wide[..., :width] = candidates
    copied = copied[:, :depth]
    known = (candidates[:, : copied.shape[1]] == copied[..., None]).any(-1)
    wide[:, : copied.shape[1], width] = np.where(known, -1, copied)
    return wide


class Graft:
    """Copied continuations of all rows, put among the drafter's candidates.

    Args:
        tokens: [B, L] copied tokens.
        log_chances: [B, L] log-probability of each behind the one before; -inf where a row's copy has ended.
    """

    def __init__(self, tokens: Tensor, log_chances: Tensor) -> None:
        self.tokens = tokens
        self.log_chances = log_chances

    @classmethod
    def of(cls, copies: list[tuple[list[int], float]], device: torch.device) -> Graft | None:
        """What `RowLookup.suggest` found for each row; None if it found nothing for any."""
        tokens, chances = (torch.from_numpy(part) for part in padded(copies))
        return cls(tokens.to(device), chances.float().to(device)) if tokens.numel() else None

    def extend(self, candidates: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Make the copied token a candidate at every depth, and go deeper than the drafter if the copy does.

        Args:
            candidates, scores: [B, d, K] of the drafter.

        Returns:
            The same as [B, max(d, L), K + 1]. Added candidates score -inf, but for `raised`; -1 is none.
        """
        batch, depth, width = candidates.shape
        length = self.tokens.shape[1]
        wide = candidates.new_full((batch, max(depth, length), width + 1), -1)
        wide[:, :depth, :width] = candidates
        wide_scores = scores.new_full(wide.shape, -inf)
        wide_scores[:, :depth, :width] = scores
        known = (wide[:, :length] == self.tokens[..., None]).any(-1)
        wide[:, :length, width] = torch.where(known, -1, self.tokens)
        return wide, wide_scores

    def raised(self, beam: Beam, steps: Tensor) -> Tensor:
        """Raise the score of each copied token behind the one before it to its chance.

        A path that meets the copied text half way goes on with it, too.

        Args:
            beam: paths through candidates that `extend` returned.
            steps: [B, W, K] scores of the candidates at the next depth.
        """
        depth = beam.depth
        if depth >= self.tokens.shape[1]:
            return steps
        follows = (beam.candidates[:, depth] == self.tokens[:, depth, None])[:, None]  # [B, 1, K]
        if depth > 0:  # the root is in front of the first
            in_front = beam.candidates[:, depth - 1].gather(1, beam.last)  # [B, W]
            follows = follows & (in_front == self.tokens[:, depth - 1, None])[..., None]
        chances = self.log_chances[:, depth, None, None].to(steps.dtype)
        return torch.where(follows, steps.maximum(chances), steps)
