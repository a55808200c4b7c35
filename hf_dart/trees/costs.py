"""What a round of drafting costs, and how large a tree is worth verifying.

One rule decides (CAST, arXiv 2610.00321; BASTION, arXiv 2605.29727): the tree has the size at which the tokens that a
round is expected to bring, over what it costs, are most. Costs are relative to a round without drafts. `hf-dart
profile` measures them when it is asked to, and what it found is kept with the head; where nobody said what rounds
cost, those on a CPU show it as they go (`hf_dart.decoding.costs`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

Points = tuple[tuple[float, float], ...]
"""(size, cost), both rising; straight lines between them, and on after the last one."""

DRAFT_COST = 0.2
"""What a draft is taken to cost where nothing is known of it, and at least where it is estimated."""

LEVEL_COST = 0.25
"""What a level costs on a target with running states where nothing is known of it (`model_cards/hybrid_costs`)."""

ANY_TREE, NODE_COST = 0.1, 0.03
"""What a tree on a CPU is taken to cost beside its nodes (masks, kernels for more than one query), and what each of
them in one row, where nothing is known of it."""

_FIRST, _DOUBLED = 0.676, 0.57
"""Tokens that a round brings beside its own: `_FIRST` of a tree of two nodes, and for one of 2**n, n**`_DOUBLED` as
many. Fits the packaged pair's 2.49, 2.68 and 2.86 for trees of 16, 32 and 60 nodes."""


def interpolated(points: Sequence[tuple[float, float]], size: float) -> float:
    """The cost of a size, from at least two points."""
    place = min(max(bisect_left(points, (size,)), 1), len(points) - 1)
    (left, low), (right, high) = points[place - 1], points[place]
    return low + (high - low) * (size - left) / (right - left)


def checked_points(name: str, points: Any) -> Points:
    """The points as tuples; a `ValueError` if they are no costs of rising sizes, from 1 token at cost 1 on."""
    try:
        pairs = tuple((float(size), float(cost)) for size, cost in points)
    except (TypeError, ValueError):
        pairs = ()
    rising = all(right[0] > left[0] and right[1] >= left[1] for left, right in pairwise(pairs))
    if len(pairs) < 2 or pairs[0] != (1, 1) or not rising or not isfinite(pairs[-1][0] + pairs[-1][1]):
        raise ValueError(
            f"{name} is {points!r:.200}; give two or more pairs of tokens and cost, both rising, the first (1, 1), as "
            "`hf-dart profile` prints them."
        )
    return pairs


@dataclass(frozen=True)
class VerifyCost:
    """What verifying trees costs beside their roots, relative to a round without a draft.

    Attributes:
        tree: of any tree.
        node: of one node more in every row.
        level: of each level of nodes, where a target computes its trees level by level.
    """

    tree: float
    node: float
    level: float = 0.0


@dataclass(frozen=True)
class RoundCost:
    """What a round of one batch costs.

    Attributes:
        draft: of the draft.
        points: (nodes per row, cost of verifying so many).
        level: of each level of nodes below the roots, where a target computes its trees level by level.
    """

    draft: float
    points: Points
    level: float = 0.0

    @classmethod
    def linear(cls, draft: float, verify: VerifyCost) -> RoundCost:
        """Every node costs the same, and the first one below the roots what any tree costs beside it."""
        two = 1 + verify.tree + verify.node
        return cls(draft, ((1, 1.0), (2, two), (3, two + verify.node)), verify.level)

    @classmethod
    def measured(cls, draft: float, tokens: Points, batch: int) -> RoundCost:
        """From the costs of forwards of so many `tokens`, relative to one of a single token."""
        plain = interpolated(tokens, batch)
        knots = sorted({1.0, *(size / batch for size, _ in tokens if size > batch), 2 * tokens[-1][0] / batch})
        if len(knots) == 1:
            knots.append(2.0)
        return cls(draft, tuple((nodes, interpolated(tokens, nodes * batch) / plain) for nodes in knots))

    def of(self, nodes: float, levels: int = 0) -> float:
        """The cost of a round that verifies trees of so many nodes and levels below the root, after a draft."""
        return self.draft + interpolated(self.points, nodes) + self.level * levels

    def of_each(self, most: int) -> NDArray[Any]:
        """`of` of 1 to `most` nodes, levels left out."""
        sizes, costs = np.array(self.points).T
        nodes = np.arange(1, most + 1)
        beyond = (costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2]) * np.maximum(nodes - sizes[-1], 0)
        return self.draft + np.interp(nodes, sizes, costs) + beyond


def nodes_worth(cost: RoundCost, most: int) -> int:
    """Nodes per row at which rounds of one size bring most for what they cost, for drafts that are usual.

    Trees that are sized one by one follow their own chances; rounds of fixed shapes cannot.

    Args:
        cost: of a round of the batch.
        most: nodes per row, 2 or more.
    """
    nodes = np.arange(2, most + 1)
    tokens = 1 + _FIRST * np.log2(nodes) ** _DOUBLED
    return int(nodes[(tokens / cost.of_each(most)[1:]).argmax()])
