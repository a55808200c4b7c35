"""Draft trees grown on the host, best node first: what `grow_tree` does by depth, for a few rows on a CPU.

A beam of tensors costs some twenty small operations per depth, more than a small target's layer. Opening one
node at a time finds the same tree (without a beam's limit: the best N nodes of all paths), and it knows each
node's chance before the node is paid for, so that the size can follow the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import exp, inf
from typing import NamedTuple

import numpy as np
import torch

from hf_dart.tree import FLOOR, STEP, DraftTree


@dataclass(frozen=True)
class RowDraft:
    """What one row may grow from, as Python numbers.

    Attributes:
        root: the last committed token.
        candidates: [d][K] token ids per depth; -1 is no candidate.
        table: [d][J][K] log-score of candidate k behind candidate j of the depth before; J is 1 where the score
            does not depend on it.
        deepest: no node lies deeper.
        copied: tokens that followed the same text earlier (`hf_dart.lookup`); where they lie within d, they are
            among the candidates.
        log_chance: log-probability of each copied token behind the one before.
        rescore: makes of the log-scores [K] at a depth, from 0, those behind the last tokens of a path; None leaves
            them as they are.
        history: the last committed tokens, the root included, as many as `rescore` looks at.
    """

    root: int
    candidates: list[list[int]]
    table: list[list[list[float]]]
    deepest: int
    copied: Sequence[int] = ()
    log_chance: float = -inf
    rescore: Callable[[int, Sequence[float], tuple[int, ...]], list[float]] | None = None
    history: tuple[int, ...] = ()


class _Node(NamedTuple):
    token: int
    parent: int
    depth: int
    score: float


def best_first(
    drafts: list[RowDraft], *, nodes: int, node_cost: float = 0.0, draft_cost: float = 0.0
) -> DraftTree:
    """Grow one tree per row, all of one size N <= `nodes`.

    The trees grow by one node in every row while the tokens that those are expected to bring, over their cost,
    exceed the tokens expected of the whole round over its cost; so the size is the one of most tokens per time.

    Args:
        drafts: one per row.
        nodes: most nodes per row, the root included.
        node_cost: cost of verifying one more node in one row, relative to a round that verifies the root alone;
            0 grows to `nodes`.
        draft_cost: cost of the draft, relative to the same.

    Returns:
        The trees, on the CPU. A row that has fewer nodes than others is filled up with empty ones.
    """
    batch = len(drafts)
    growing = [_open_best(draft) for draft in drafts]
    rows: list[list[_Node]] = [[] for _ in drafts]
    step_cost, cost, expected, size = batch * node_cost, 1 + draft_cost, float(batch), 1
    while size < nodes:
        found = [next(row, None) for row in growing]
        gain = sum(exp(node.score) for node in found if node)
        if gain == 0 or gain * cost < expected * step_cost:
            break
        for row, node in zip(rows, found, strict=True):
            if node:
                row.append(node)
        expected += gain
        cost += step_cost
        size += 1
    return _assemble([draft.root for draft in drafts], rows, size)


def _open_best(draft: RowDraft) -> Iterator[_Node]:
    """All nodes below the root by falling score; a parent comes before its children."""
    # Of every opened node's children only the best one waits; its next sibling follows it in. Entries sort by
    # score, and among equals by when they were pushed.
    waiting: list[tuple[float, int, int, float, int, list[tuple[float, int]], int]] = []
    pushed = opened = 0
    # What stands in front of each opened node's children, where scores depend on it.
    contexts = [draft.history]

    def wait(parent: int, above: float, depth: int, children: list[tuple[float, int]], place: int) -> None:
        nonlocal pushed
        if place < len(children):
            heappush(waiting, (-above - children[place][0], pushed, parent, above, depth, children, place))
            pushed += 1

    wait(0, 0.0, 1, _children(draft, 0, 0, True, draft.history), 0)
    while waiting:
        negative, _, parent, above, depth, children, place = heappop(waiting)
        column = children[place][1]
        drafted = depth <= len(draft.candidates)
        token = draft.candidates[depth - 1][column] if drafted else draft.copied[depth - 1]
        opened += 1
        yield _Node(token, parent, depth, -negative)
        wait(parent, above, depth, children, place + 1)
        copying = depth <= len(draft.copied) and token == draft.copied[depth - 1]
        if draft.history:
            contexts.append((*contexts[parent], token)[-len(draft.history) :])
        wait(opened, -negative, depth + 1, _children(draft, depth, column, copying, contexts[-1]), 0)


def _children(
    draft: RowDraft, depth: int, column: int, copying: bool, context: tuple[int, ...]
) -> list[tuple[float, int]]:
    """(score, column) of what may follow a node of `depth` in `column`, best first.

    `copying`: the node's token is the copied one of its depth (or it is the root), so the copy may go on.
    `context`: the last tokens of the path to the node.
    """
    if depth >= draft.deepest:
        return []
    copied = draft.copied[depth] if copying and depth < len(draft.copied) else None
    if depth >= len(draft.candidates):
        return [] if copied is None else [(_bounded(draft.log_chance), 0)]
    table = draft.table[depth]
    scores = table[column if len(table) > 1 else 0]
    if draft.rescore is not None:
        scores = draft.rescore(depth, scores, context)
    found = []
    for place, (token, score) in enumerate(zip(draft.candidates[depth], scores, strict=True)):
        if token == copied and score < draft.log_chance:
            score = draft.log_chance
        if score > -inf and token >= 0:
            found.append((_bounded(score), place))
    found.sort(reverse=True)
    return found


def _bounded(step: float) -> float:
    """As `tree.bounded`."""
    return max(FLOOR, min(step, -STEP))


def _assemble(roots: list[int], rows: list[list[_Node]], size: int) -> DraftTree:
    batch = len(roots)
    tokens = np.repeat(np.array(roots)[:, None], size, axis=1)
    parents = np.full((batch, size), -1)
    depths = np.zeros((batch, size), dtype=np.int64)
    ancestors = np.broadcast_to(np.eye(size, dtype=bool), (batch, size, size)).copy()
    scores = np.full((batch, size), -inf)
    scores[:, 0] = 0
    for row, nodes in enumerate(rows):
        for place, node in enumerate(nodes, start=1):
            scores[row, place] = node.score
            tokens[row, place], parents[row, place], depths[row, place] = node.token, node.parent, node.depth
            ancestors[row, place] |= ancestors[row, node.parent]
    as_tensor = torch.from_numpy
    return DraftTree(
        as_tensor(tokens),
        as_tensor(parents),
        as_tensor(depths),
        as_tensor(ancestors),
        int(depths.max()),
        as_tensor(scores),
    )
