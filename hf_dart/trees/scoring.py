"""What a candidate is worth behind a path: the drafter's chances and those of an n-gram table in one score.

Scores decide which nodes a tree has, never what the target makes of them: whatever they are, the output is the same.
Two ways to put them together (`TreeConfig.scores`):

- "survival": p(t) · q(t)^w, q being the table's probability, shared out among the candidates anew so that together
  they keep what the drafter gave them: an estimate of how likely the target's own token is t.
  With `TreeConfig.calibrate`, corrected by what the target has accepted so far (`decoding.calibration`).
- "paper": DART's weighted sum (arXiv 2601.19278, section 3.3), which ranks but is no chance.

Both for a beam of paths: `HostScores` on the host, in NumPy, and `BeamScores` in tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_dart.configuration import TreeConfig
from hf_dart.decoding.calibration import Calibration
from hf_dart.lookup import Graft
from hf_dart.ngram.table import Array, NgramTable
from hf_dart.trees.by_depth import take
from hf_dart.trees.tree import Beam, Transitions

_UNSEEN = 1e-4
"""Taken for the probability of what the corpus does not have; small enough to tell, and a draft survives it."""
# DART, section 3.3 and released code: weight of depth i, of the draft's part at depth i, and what a logarithm is kept
# away from 0 by. The first token, whose context the head has read, is scored without the n-grams.
_LEVEL, _FADING, _EPSILON = -0.7, 0.9, 1e-10


@dataclass(frozen=True)
class PathScores:
    """How the parts of a score are put together.

    Attributes:
        config: `scores` and `ngram_weight` count.
        table: None for none.
        calibration: corrects what came out, if there is one.
    """

    config: TreeConfig
    table: NgramTable | None
    calibration: Calibration | None = None

    @property
    def plain(self) -> bool:
        """Is a score just what the drafter says?"""
        return self.config.scores == "survival" and self._table is None and self.calibration is None

    @property
    def _table(self) -> NgramTable | None:
        return self.table if self.config.ngram_weight else None

    @property
    def context(self) -> int:
        """How many tokens in front of a candidate count."""
        return 0 if self._table is None else self._table.spec.order - 1

    def uses_table(self, depth: int) -> bool:
        """Do candidates at this depth, from 0, look into the table?"""
        return self._table is not None and (self.config.scores == "survival" or depth > 0)

    def drafted(self, steps: Array) -> Array:
        """The drafter's part of all scores [B, d, J, K], from its log-probabilities [B, d, J, K]."""
        if self.config.scores != "paper":
            return steps
        depth = np.arange(steps.shape[1])[:, None, None]
        scores = _FADING**depth * (depth + 1) ** _LEVEL * np.log(np.exp(steps - _log_sum(steps)) + _EPSILON)
        # The epsilon would make a candidate of what is none.
        return np.where(steps == -np.inf, -np.inf, scores)

    def on_host(self, depth: int, drafted: Array, shares: Array | None = None) -> Array:
        """Scores [..., K] at a depth: the drafter's part and, where it is used, what the table says [..., K]."""
        weight, scores = self.config.ngram_weight, drafted
        if shares is not None and self.config.scores == "paper":
            scores = drafted + weight * (depth + 1) ** _LEVEL * np.log(shares + _EPSILON)
        elif shares is not None:
            scores = drafted + weight * np.log(shares + _UNSEEN)
            scores = scores + (_log_sum(drafted) - _log_sum(scores))
        return scores if self.calibration is None else self.calibration.on_host(depth, scores)

    def on_device(self, depth: int, steps: Tensor, shares: Tensor | None) -> Tensor:
        """As `on_host`, for paths [B, W]: `steps` and `shares` are [B, W, K]."""
        together = steps.logsumexp(-1, keepdim=True)
        weight = self.config.ngram_weight
        if self.config.scores == "paper":
            scores = _FADING**depth * ((steps - together).exp() + _EPSILON).log()
            if shares is not None:
                scores = scores + weight * (shares + _EPSILON).log().to(steps.dtype)
            return (scores * (depth + 1) ** _LEVEL).masked_fill(steps == -torch.inf, -torch.inf)
        if shares is not None:
            steps = steps + weight * (shares + _UNSEEN).log().to(steps.dtype)
            steps = steps - steps.logsumexp(-1, keepdim=True) + together
        return steps if self.calibration is None else self.calibration.on_device(depth, steps)


class HostScores:
    """The `by_depth.PathScorer` of all rows in one round, with a table.

    Args:
        scores: how.
        candidates: [B, d, K] token ids per depth; -1 is no candidate. Lookups are quicker where they ascend.
        steps: [B, d, J, K] log-probability of candidate k behind candidate j of the depth in front, by the drafter; J
            is 1 where it does not depend on it.
    """

    def __init__(self, scores: PathScores, candidates: Array, steps: Array) -> None:
        assert scores.table is not None
        self._scores, self._drafted = scores, scores.drafted(steps)
        self._ngrams = scores.table.on_host
        self._tokens = self._ngrams.known(candidates)[:, :, None]
        self._alone = self._ngrams.alone(self._tokens)

    def __call__(self, depth: int, columns: Array, paths: Array) -> Array:
        shares = None
        if self._scores.uses_table(depth):
            shares = self._ngrams.behind(self._ngrams.known(paths), self._tokens[:, depth], self._alone[:, depth])
        return self._scores.on_host(depth, _rows(self._drafted[:, depth], columns), shares)


@dataclass(frozen=True)
class BeamScores:
    """The `tree.Scorer` of all rows in one round.

    Attributes:
        scores: how.
        drafted: depths that the drafter has candidates for; deeper ones are copied text alone.
        pairs: [B, d, K, K] transitions of a selector, if there is one.
        graft: copied text, if there is any.
    """

    scores: PathScores
    drafted: int
    pairs: Transitions | None
    graft: Graft | None

    def __call__(self, beam: Beam, scores: Tensor) -> Tensor:
        depth, width = beam.depth, beam.last.shape[1]
        steps = scores[:, None].expand(-1, width, -1)
        if depth < self.drafted:
            if self.pairs is not None:
                steps = self.pairs(beam, scores)
            if not self.scores.plain:
                steps = self.scores.on_device(depth, steps, self._shares(beam))
        return steps if self.graft is None else self.graft.raised(beam, steps)

    def _shares(self, beam: Beam) -> Tensor | None:
        table = self.scores.table
        if table is None or not self.scores.uses_table(beam.depth):
            return None
        candidates = beam.candidates[:, beam.depth, None]
        return table.on(candidates.device).probabilities(beam.paths(self.scores.context), candidates)


def _rows(table: Array, columns: Array) -> Array:
    """Rows [B, W, K] of a table [B, J, K] that stand behind candidates `columns` [B, W]; as it is where J is 1."""
    return table if table.shape[1] == 1 else take(table, columns)


def _log_sum(values: Array) -> Array:
    """log Σ exp over the last dimension, which stays; -inf of nothing but -inf."""
    largest = np.maximum(values.max(-1, keepdims=True), -1e30)
    return np.asarray(largest + np.log(np.exp(values - largest).sum(-1, keepdims=True)))
