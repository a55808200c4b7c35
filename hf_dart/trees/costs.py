"""Cost of a round, and the number of nodes that is worth verifying at that cost.

One rule decides (CAST, arXiv 2610.00321; BASTION, arXiv 2605.29727): a tree has the size at which the tokens that a
round is expected to bring, divided by its cost, are most. Costs are relative to a round without a draft. `TreeConfig`
gives them, from the constants below or from what `hf-dart profile` measured; on a CPU `hf_dart.decoding.pace` replaces
the constants by measured times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

Points = tuple[tuple[float, float], ...]
"""Pairs (size, cost) of rising sizes; straight lines between them, and on after the last one unless it falls there."""

DRAFT_COST = 0.2  # cost of a draft where nothing is known of it, and the least that is estimated for one

LEVEL_COST = 0.25
"""Estimated cost of a level on a target that computes its trees level by level (`model_cards/hybrid_costs`)."""

ANY_TREE, NODE_COST = 0.1, 0.03
"""Estimated costs on a CPU: of any tree (masks, kernels for more than one query), and of each node in one row."""


@dataclass(frozen=True, eq=False)
class RoundCost:
    """Cost of a round of one batch: of its draft, 0 without one, and of verifying its trees."""

    draft: float
    verify: Array  # [N] of trees of 1 to N nodes per row; it may fall from one size to the next
    level: float = 0.0  # of each level of nodes below the roots, where a target computes its trees level by level

    def of(self, nodes: int, levels: int = 0) -> float:
        """Cost of a round that verifies trees of `nodes` nodes on `levels` levels below the root."""
        return self.draft + float(self.verify[nodes - 1]) + self.level * levels

    def best_size(self, gains: Array, levels: Array | int) -> tuple[int, float, float]:
        """Return the number of nodes below each root at which a round brings most for its cost, its tokens and cost.

        It brings 1 token, and `gains` [n] with one node more at a time, at most N - 1; trees that reach down to each of
        these have so many `levels` [n], or all have as many.
        """
        expected = np.ones(len(gains) + 1)
        expected[1:] += gains.cumsum()
        costs = self.draft + self.verify[: len(expected)]
        if self.level:
            costs[1:] += self.level * levels
        size = len(gains) - int((expected / costs)[::-1].argmax())  # the largest of the best
        return size, float(expected[size]), float(costs[size])


def interpolated(points: Sequence[tuple[float, float]], sizes: Any) -> Array:
    """Costs of `sizes`, numbers of any shape, by at least two points."""
    known, costs = np.array(points).T
    slope = max(costs[-1] - costs[-2], 0.0) / (known[-1] - known[-2])
    return np.interp(sizes, known, costs) + slope * np.maximum(np.asarray(sizes) - known[-1], 0)


def checked_points(name: str, points: Any) -> Points:
    """Return the points as tuples; raise if they are no costs of rising sizes, from 1 token at cost 1 on."""
    try:
        pairs = tuple((float(size), float(cost)) for size, cost in points)
    except (TypeError, ValueError):
        pairs = ()
    fit = all(right[0] > left[0] and 0 < right[1] < inf for left, right in pairwise(pairs))
    if len(pairs) < 2 or pairs[0] != (1, 1) or not fit or pairs[-1][0] == inf:
        raise ValueError(
            f"{name} is {points!r:.200}; give two or more pairs of tokens and cost, tokens rising and costs above 0, "
            "the first (1, 1), as `hf-dart profile` prints them."
        )
    return pairs
