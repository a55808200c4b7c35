"""How far a score can be trusted: Platt's logistic correction of each depth, learned from what the target accepts.

A draft is surer of itself than it may be, and more so the deeper it goes. A node's chance is
p̂ = σ(a · logit(p) + b), with a and b of its depth (TreeSpark, arXiv 2609.22098, fits them once and for all). Every
round says of the children of each accepted node which of them, if any, the target chose; so a and b follow the text
of the call. Nothing is left of them behind it.
"""

from __future__ import annotations

from math import exp, inf, log

import numpy as np
import torch
from torch import Tensor

from hf_dart.decoding.walk import Accepted
from hf_dart.ngram.table import Array
from hf_dart.trees.tree import DraftTree

# What the start, a = 1 and b = 0, weighs: the inverse of the variance that is granted to each.
_PRIOR = (16.0, 4.0)
_SUREST = 1e-4  # no chance that comes in is held to be closer to 0 or 1
_STEEPEST = 30.0  # and no logit that goes out is further from 0


class Calibration:
    """The corrections of one call, per depth."""

    def __init__(self) -> None:
        self._depths: list[_Logistic] = []

    def on_host(self, depth: int, scores: Array) -> Array:
        """Corrected log-chances of log-chances [..., K] at one depth, from 0."""
        at = self._at(depth)
        chances = np.exp(scores).clip(_SUREST, 1 - _SUREST)
        line = (at.slope * np.log(chances / (1 - chances)) + at.offset).clip(-_STEEPEST, _STEEPEST)
        return np.where(scores > -inf, -np.log1p(np.exp(-line)), -inf)

    def on_device(self, depth: int, scores: Tensor) -> Tensor:
        """As `on_host`, of [B, W, K]."""
        at = self._at(depth)
        chances = scores.exp().clamp(_SUREST, 1 - _SUREST)
        line = (at.slope * torch.logit(chances) + at.offset).clamp(-_STEEPEST, _STEEPEST)
        corrected = torch.nn.functional.logsigmoid(line)
        return torch.where(scores > -inf, corrected, -inf)

    def learn(self, tree: DraftTree, accepted: Accepted, copied: list[list[int]]) -> None:
        """Learn from one round.

        Args:
            tree: with `scores`.
            accepted: what the walk took from it.
            copied: per row the copied tokens in the tree, whose chances are known from elsewhere.
        """
        assert tree.scores is not None
        rows = zip(
            *(part.tolist() for part in (tree.tokens, tree.parents, tree.depths, tree.scores)),
            accepted.path.tolist(),
            accepted.counts,
            copied,
            strict=True,
        )
        for tokens, parents, depths, scores, path, count, copy in rows:
            taken = set(path[:count])
            for node in range(1, len(tokens)):
                parent, depth = parents[node], depths[node] - 1
                if parent in taken and not (depth < len(copy) and tokens[node] == copy[depth]):
                    at = self._at(depth)
                    at.learn(at.undone(scores[node] - scores[parent]), node in taken)

    def _at(self, depth: int) -> _Logistic:
        while len(self._depths) <= depth:
            self._depths.append(_Logistic())
        return self._depths[depth]


class _Logistic:
    """One pair of a and b, a logistic regression that takes its examples one at a time (a Newton step for each)."""

    def __init__(self) -> None:
        self.slope, self.offset = 1.0, 0.0
        self._curvature = [_PRIOR[0], 0.0, _PRIOR[1]]  # of the log-loss so far: both squares and what is between

    def undone(self, corrected: float) -> float:
        """The logit that a corrected log-chance was made from."""
        return (_logit(corrected) - self.offset) / self.slope

    def learn(self, logit: float, right: bool) -> None:
        """Take in one node and whether it was the target's."""
        chance = 1 / (1 + exp(-self._line(logit)))
        weight, error = chance * (1 - chance), chance - right
        self._curvature[0] += weight * logit * logit
        self._curvature[1] += weight * logit
        self._curvature[2] += weight
        first, mixed, second = self._curvature
        size = first * second - mixed * mixed
        self.slope -= error * (second * logit - mixed) / size
        self.offset -= error * (first - mixed * logit) / size
        # A better score is a better score, and `undone` can tell them apart.
        self.slope = max(self.slope, 0.1)

    def _line(self, logit: float) -> float:
        return min(max(self.slope * logit + self.offset, -_STEEPEST), _STEEPEST)


def _logit(score: float) -> float:
    chance = min(max(exp(score), _SUREST), 1 - _SUREST)
    return log(chance / (1 - chance))
