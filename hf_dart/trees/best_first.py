"""Draft trees grown on the host, best node first: what `grow_tree` does by depth, for a few rows on a CPU.

A beam of tensors costs some twenty small operations per depth, more than a small target's layer. Opening one
node at a time finds the same tree (without a beam's limit: the best N nodes of all paths), and it knows each
node's chance before the node is paid for, so that the size can follow the draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import exp, inf
from typing import NamedTuple, Protocol

import numpy as np
import torch

from hf_dart.trees.costs import RoundCost
from hf_dart.trees.tree import FLOOR, STEP, DraftTree


class Node(NamedTuple):
    """One node; `parent` is its parent's number, 0 being the root, 1 the node that came first."""

    token: int
    parent: int
    depth: int
    score: float


class Growing(Protocol):
    """What one row may grow from."""

    @property
    def root(self) -> int:
        """The last committed token."""
        ...

    def best(self, count: int) -> Iterator[Node]:
        """The `count` best nodes below the root by falling score, a parent before its children."""
        ...


@dataclass(frozen=True)
class RowDraft:
    """What one row may grow from, as Python numbers, where scores depend on the token in front at most.

    Attributes:
        root: the last committed token.
        candidates: [d][K] token ids per depth; -1 is no candidate.
        table: [d][J][K] log-score of candidate k behind candidate j of the depth before; J is 1 where the score
            does not depend on it.
        deepest: no node lies deeper.
        copied: tokens that followed the same text earlier (`hf_dart.lookup`); where they lie within d, they are
            among the candidates.
        log_chance: log-probability of each copied token behind the one before.
    """

    root: int
    candidates: list[list[int]]
    table: list[list[list[float]]]
    deepest: int
    copied: Sequence[int] = ()
    log_chance: float = -inf

    def best(self, count: int) -> Iterator[Node]:
        """As `Growing.best`; more are found where more are asked for."""
        # Of every opened node's children only the best one waits; its next sibling follows it in. Entries sort by
        # score, and among equals by when they were pushed.
        waiting: list[tuple[float, int, int, float, int, list[tuple[float, int]], int]] = []
        pushed = opened = 0

        def wait(parent: int, above: float, depth: int, children: list[tuple[float, int]], place: int) -> None:
            nonlocal pushed
            if place < len(children):
                heappush(waiting, (-above - children[place][0], pushed, parent, above, depth, children, place))
                pushed += 1

        wait(0, 0.0, 1, self._children(0, 0, True), 0)
        while waiting:
            negative, _, parent, above, depth, children, place = heappop(waiting)
            column = children[place][1]
            drafted = depth <= len(self.candidates)
            token = self.candidates[depth - 1][column] if drafted else self.copied[depth - 1]
            opened += 1
            yield Node(token, parent, depth, -negative)
            wait(parent, above, depth, children, place + 1)
            copying = depth <= len(self.copied) and token == self.copied[depth - 1]
            wait(opened, -negative, depth + 1, self._children(depth, column, copying), 0)

    def _children(self, depth: int, column: int, copying: bool) -> list[tuple[float, int]]:
        """(score, column) of what may follow a node of `depth` in `column`, best first.

        `copying`: the node's token is the copied one of its depth (or it is the root), so the copy may go on.
        """
        if depth >= self.deepest:
            return []
        copied = self.copied[depth] if copying and depth < len(self.copied) else None
        if depth >= len(self.candidates):
            return [] if copied is None else [(_bounded(self.log_chance), 0)]
        table = self.table[depth]
        scores = table[column if len(table) > 1 else 0]
        found = []
        for place, (token, score) in enumerate(zip(self.candidates[depth], scores, strict=True)):
            if token == copied and score < self.log_chance:
                score = self.log_chance
            if score > -inf and token >= 0:
                found.append((_bounded(score), place))
        found.sort(reverse=True)
        return found


def best_first(
    drafts: Sequence[Growing], *, nodes: int, cost: RoundCost | None = None, shares: Sequence[float] | None = None
) -> DraftTree:
    """Grow one tree per row, all of one size N <= `nodes`.

    The trees grow by one node in every row; the size is the one at which the tokens expected of the round, over its
    cost, are most.

    Args:
        drafts: one per row.
        nodes: most nodes per row, the root included.
        cost: of the round; None grows to `nodes`.
        shares: what a token of each row counts for; None is as much in all.

    Returns:
        The trees, on the CPU. A row that has fewer nodes than others is filled up with empty ones.
    """
    growing = [draft.best(nodes - 1) for draft in drafts]
    rows: list[list[Node]] = [[] for _ in drafts]
    shares = [1.0] * len(drafts) if shares is None else shares
    expected = sum(shares)
    size = best_size = 1
    best = expected / cost.of(1) if cost else 0.0
    while size < nodes:
        found = [next(row, None) for row in growing]
        gain = sum(share * exp(node.score) for share, node in zip(shares, found, strict=True) if node)
        if gain == 0 or (cost and not cost.pays_to_grow(size, nodes, expected, gain, best)):
            break
        for row, node in zip(rows, found, strict=True):
            if node:
                row.append(node)
        expected += gain
        size += 1
        rate = expected / cost.of(size) if cost else expected
        if rate >= best:
            best, best_size = rate, size
    return _assemble([draft.root for draft in drafts], [row[: best_size - 1] for row in rows], best_size)


def _bounded(step: float) -> float:
    """As `tree.bounded`."""
    return max(FLOOR, min(step, -STEP))


def _assemble(roots: list[int], rows: list[list[Node]], size: int) -> DraftTree:
    batch = len(roots)
    ancestors = np.broadcast_to(np.eye(size, dtype=bool), (batch, size, size)).copy()
    found: list[list[Node]] = []
    for row, (root, nodes) in enumerate(zip(roots, rows, strict=True)):
        of_row = ancestors[row]
        for place, node in enumerate(nodes, start=1):
            of_row[place] |= of_row[node.parent]
        empty = [Node(root, -1, 0, -inf)] * (size - 1 - len(nodes))
        found.append([Node(root, -1, 0, 0.0), *nodes, *empty])
    tokens, parents, depths = (torch.tensor([[node[part] for node in nodes] for nodes in found]) for part in range(3))
    scores = torch.tensor([[node.score for node in nodes] for nodes in found], dtype=torch.float64)
    deepest = max(node.depth for nodes in found for node in nodes)
    return DraftTree(tokens, parents, depths, torch.from_numpy(ancestors), deepest, scores)
