"""Candidates of a round, and their scores: the drafter's probability and an n-gram table's, in one formula.

A score is the log-probability that a token comes next, so that the scores of a path add up to that of the whole path.
Scores decide which nodes a tree has, never what the target makes of them: whatever they are, the output is the same.
`TreeConfig.scores` names the formula. With the drafter's probability p(t) of a candidate t, the table's probability
q(t) of t after the tokens before it, and its weight w = `TreeConfig.ngram_weight`:

- "survival": p(t) · (q(t) + 1e-4)^w, scaled so that all candidates of a depth together keep the probability that the
  drafter gave them. It estimates how likely the target's own token is t.
- "paper": DART's weighted sum of log p(t) and log q(t) (arXiv 2601.19278, section 3.3), which ranks tokens but is no
  probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from hf_dart.trees.config import TreeConfig
from hf_dart.trees.copies import CopyLevels
from hf_dart.trees.costs import Array
from hf_dart.trees.ngram.table import NgramTable
from hf_dart.trees.tree import STEP

FLOOR = -30.0  # no step down a tree is deeper
_UNSEEN = 1e-4
"""Added to every probability of a table; small enough to tell apart, and a draft of unseen text survives it."""
# DART, section 3.3 and released code: weight of depth i, of the draft's part at depth i, and what a logarithm is kept
# away from 0 by. The first token, whose context the head has read, is scored without the n-grams.
_LEVEL, _FADING, _EPSILON = -0.7, 0.9, 1e-10

PathScorer = Callable[[int, Array, Array], Array]
"""Scores [B, W, K] of a depth's K candidates after each of W paths; [B, 1, K] where they do not depend on the path.

Called with the depth, counted from 0; [B, W], which candidate of the depth before each path ends in (0 for the root);
and [B, W, C], the last tokens of each path. Scores lie between `FLOOR` and -`STEP`, or are -inf for no candidate.
"""


@dataclass(frozen=True)
class DraftScores:
    """The formula that a [`TreeConfig`] names."""

    config: TreeConfig  # its `scores` and `ngram_weight` count
    table: NgramTable | None = None  # n-grams of a corpus; None for the drafter's scores alone

    @property
    def context(self) -> int:
        """Number of tokens before a candidate that its score depends on, beyond the drafter's part."""
        return self.table.spec.order - 1 if self.table is not None and self.config.ngram_weight else 0

    def scorer(self, tokens: Array, steps: Array) -> PathScorer:
        """Return the scores of one round of candidates [B, d, K], of which -1 is none.

        `steps` [B, d, J, K] are the drafter's log-probabilities of candidate k after candidate j of the depth before; J
        is 1 where they do not depend on that. They are -inf where there is no candidate.
        """
        config, ngrams = self.config, self.table if self.context else None
        paper, known = config.scores == "paper", tokens if ngrams is None else ngrams.known(tokens)
        if paper:
            # The epsilon would turn missing candidates into candidates.
            steps = np.where(steps > -inf, np.log(np.exp(steps - _log_sum(steps)) + _EPSILON), -inf)
        elif ngrams is None:
            steps = bounded(steps)

        def shares(depth: int, paths: Array, added: float) -> Array:
            """Weighted log-probabilities w · log(q + `added`) [B, W, K] of the candidates after each path."""
            if ngrams is None:
                return np.zeros(1)
            return config.ngram_weight * np.log(ngrams.after(ngrams.known(paths), known[:, depth, None]) + added)

        def score(depth: int, columns: Array, paths: Array) -> Array:
            here = steps[:, depth]
            if here.shape[1] > 1:
                here = take(here, columns)
            if paper:
                here = _FADING**depth * here + (shares(depth, paths, _EPSILON) if depth else 0)
                return bounded((depth + 1) ** _LEVEL * here)
            if ngrams is None:
                return here
            joined = here + shares(depth, paths, _UNSEEN)
            return bounded(joined + (_log_sum(here) - _log_sum(joined)))

        return score


def bounded(steps: Array) -> Array:
    """Log-scores as steps down a tree: between the floor and -STEP, or -inf where there is no node (also for nan)."""
    return np.where(steps > -inf, steps.clip(FLOOR, -STEP), -inf)


@dataclass(frozen=True)
class Candidates:
    """Candidate tokens of B rows for each of d depths, and copies of earlier text.

    Attributes:
        tokens, steps: of `DraftScores.scorer`.
    """

    history: Array  # [B, C] last committed tokens, the root of the tree last; as many as `formula` looks at, 1 at least
    tokens: Array
    steps: Array
    formula: DraftScores  # of scores from these
    copies: CopyLevels  # tokens that followed the same text earlier; those within d are among the candidates
    deepest: Sequence[int] | None = None  # [B] no node of a row lies deeper; None for no limit
    ending: Array | None = None  # [B, d, K] candidates that end the text, after which nothing grows; None for none


def take(values: Array, places: Array) -> Array:
    """Take `values` [B, n, ...] at `places` [B, m] of each row: [B, m, ...]."""
    if len(values) == 1:  # takes half the time
        return values[0].take(places, axis=0)
    return values[np.arange(len(values))[:, None], places]


def _log_sum(values: Array) -> Array:
    """Log Σ exp over the last dimension, which stays with size 1."""
    return np.logaddexp.reduce(values, axis=-1, keepdims=True)
