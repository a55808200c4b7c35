"""Draft trees grown on the host depth by depth, where what a token is worth depends on the whole path in front of it.

Opening one node at a time (`best_first`) would ask for one path's scores at a time. Here a beam of paths is scored at
once, of all rows: what `tree.grow_tree` does in tensors, in NumPy, for which a small array costs a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
import torch

from hf_dart.ngram.table import Array
from hf_dart.trees.costs import RoundCost
from hf_dart.trees.tree import FLOOR, STEP, DraftTree


class PathScorer(Protocol):
    """What candidates are worth behind a path."""

    def __call__(self, depth: int, columns: Array, paths: Array) -> Array:
        """Log-scores [B, W, K] of the candidates at `depth`, from 0; [B, 1, K] where the path does not matter.

        Args:
            columns: [B, W] which candidate of the depth in front each path ends in; 0 for the root.
            paths: [B, W, C] last tokens of each path.
        """
        ...


@dataclass(frozen=True)
class Drafts:
    """What B rows may grow from.

    Attributes:
        history: [B, C] last committed tokens, the root at the end; as many as `score` looks at, one at least.
        candidates: [B, d, K] token ids per depth, d being 1 or more; -1 is no candidate.
        score: what they are worth.
        deepest: [B] no node of a row lies deeper.
        copied: [B, L] tokens that followed the same text earlier (`hf_dart.lookup`), -1 behind the last one; where
            they lie within d, they are among the candidates.
        chances: [B, L] log-probability of each behind the one before; -inf behind the last one.
    """

    history: Array
    candidates: Array
    score: PathScorer
    deepest: Sequence[int]
    copied: Array
    chances: Array


class _Level(NamedTuple):
    """The nodes of one depth that were looked at: K tokens behind each of W paths.

    Behind what is drafted, one more level holds what is copied: K tokens in a row behind each of W paths.
    """

    scores: Array  # [B, W, K] of the paths with the token
    tokens: Array  # [B, K]
    places: Array  # [B, W] of the ends of the paths among the nodes of all levels; -1 for the root


def by_depth(
    drafts: Drafts,
    *,
    nodes: int,
    beam: int,
    cost: RoundCost | None = None,
    shares: Sequence[float] | None = None,
) -> DraftTree:
    """Grow one tree per row, all of one size N <= `nodes`.

    The trees grow by one node in every row; the size is the one at which the tokens expected of the round, over its
    cost, are most.

    Args:
        drafts: what they grow from.
        nodes: most nodes per row, the root included.
        beam: W, paths per depth that are gone on with. From `nodes` - 1 on, the best nodes of all paths are found.
        cost: of the round; None grows to `nodes`.
        shares: what a token of each row counts for; None is as much in all.

    Returns:
        The trees, on the CPU. A row that has fewer nodes than others is filled up with empty ones.
    """
    roots = drafts.history[:, -1:]
    levels = _levels(drafts, nodes - 1, beam) if nodes > 1 else []
    pool = np.concatenate([np.empty((len(roots), 0)), *(level.scores.reshape(len(roots), -1) for level in levels)], 1)
    chosen = _largest(pool, min(nodes - 1, pool.shape[1]))
    chosen = take(chosen, (-take(pool, chosen)).argsort(axis=1, kind="stable"))
    scores = take(pool, chosen)
    size = _best_size(scores, cost, np.ones(len(roots)) if shares is None else np.array(shares))
    if size == 1:
        return DraftTree.chain(torch.from_numpy(roots.copy()))
    chosen, scores = chosen[:, : size - 1], scores[:, : size - 1]
    tokens, parents, depths = _look_up(levels, drafts.candidates.shape[1], chosen)
    empty = scores == -inf
    none = np.zeros_like(roots)
    return _tree(
        np.concatenate([roots, np.where(empty, roots, tokens)], axis=1),
        np.concatenate([none - 1, np.where(empty, -1, parents)], axis=1),
        np.concatenate([none, np.where(empty, 0, depths)], axis=1),
        np.concatenate([none, scores], axis=1),
    )


def _levels(drafts: Drafts, count: int, beam: int) -> list[_Level]:
    """Among the nodes of these are the best `count` of each row."""
    candidates, copied, chances = drafts.candidates, drafts.copied, drafts.chances
    batch, drafted = candidates.shape[:2]
    deepest = min(max(drafts.deepest), max(drafted, copied.shape[1]))
    limits = np.array(drafts.deepest)[:, None, None]
    limited = min(drafts.deepest) < deepest
    paths, columns = drafts.history[:, None], np.zeros((batch, 1), dtype=np.int64)
    best, places = np.zeros((batch, 1)), np.full((batch, 1), -1)
    levels: list[_Level] = []
    size, kept = 0, np.empty((batch, 0))
    for depth in range(min(deepest, drafted)):
        tokens = candidates[:, depth]
        steps = drafts.score(depth, columns, paths)
        if depth < copied.shape[1]:
            raised = (tokens == copied[:, depth, None])[:, None]
            if depth:
                raised = raised & (paths[..., -1:] == copied[:, depth - 1, None, None])
            steps = np.where(raised, np.maximum(steps, chances[:, depth, None, None]), steps)
        steps = _bounded(steps)
        if limited:
            steps = np.where(limits > depth, steps, -inf)
        scores = best[..., None] + steps
        levels.append(_Level(scores, tokens, places))
        if depth + 1 == deepest:
            break
        scores = scores.reshape(batch, -1)
        # Children score less than their parents: none of a path that is not among the best so far will be among them.
        kept = np.concatenate([kept, scores], axis=1)
        if kept.shape[1] > count:
            kept.partition(kept.shape[1] - count, axis=1)
            kept = kept[:, -count:]
        least = kept[:, :1] if kept.shape[1] == count else -inf
        width = min(beam, max(int(np.count_nonzero(row)) for row in scores > least))
        if width == 0:
            return levels
        chosen = _largest(scores, width)
        best, places = take(scores, chosen), chosen + size
        size += scores.shape[1]
        behind, columns = np.divmod(chosen, tokens.shape[1])
        paths = np.concatenate([take(paths, behind)[..., 1:], take(tokens, columns)[..., None]], axis=-1)
    if drafted < deepest:
        # Copied text goes on behind the paths that end in it; [B, W, T] of T more tokens.
        going_on = paths[..., -1] == copied[:, drafted - 1, None]
        kept = going_on.any(0)
        steps = _bounded(chances[:, drafted:deepest])
        steps = np.where(limits[:, 0] > np.arange(drafted, deepest), steps, -inf).cumsum(1)
        scores = np.where(going_on[:, kept, None], best[:, kept, None] + steps[:, None], -inf)
        levels.append(_Level(scores, copied[:, drafted:deepest], places[:, kept]))
    return levels


def _best_size(scores: Array, cost: RoundCost | None, shares: Array) -> int:
    """Nodes, the root included, of trees whose nodes below it have scores [B, n] by falling score."""
    gains = shares @ np.exp(scores)
    gains = gains[: np.count_nonzero(gains)]
    if cost is None:
        return 1 + len(gains)
    expected = shares.sum() + np.concatenate([[0.0], gains.cumsum()])
    rates = expected / cost.of_each(len(expected))
    return len(rates) - int(rates[::-1].argmax())  # the largest of the best


def _look_up(levels: list[_Level], drafted: int, chosen: Array) -> tuple[Array, Array, Array]:
    """Tokens, parents in the tree and depths of the nodes in places `chosen` [B, n], which come in that order."""
    batch, count = chosen.shape
    widths, paths = (np.array(sizes) for sizes in zip(*(level.scores.shape[:0:-1] for level in levels), strict=True))
    ends = (widths * paths).cumsum()
    level = ends.searchsorted(chosen, side="right")
    behind, columns = np.divmod(chosen - (ends - widths * paths)[level], widths[level])
    tokens = take(np.concatenate([each.tokens for each in levels], 1), columns + (widths.cumsum() - widths)[level])
    in_front = take(np.concatenate([each.places for each in levels], 1), behind + (paths.cumsum() - paths)[level])
    depths = level + 1
    if len(levels) > drafted:
        copied = np.where(level == drafted, columns, 0)
        in_front, depths = np.where(copied > 0, chosen - 1, in_front), depths + copied
    # Children lie below their parents, so that these are among the chosen; the root is in front of all.
    numbers = np.zeros((batch, int(ends[-1]) + 1), dtype=np.int64)
    numbers[np.arange(batch)[:, None], chosen + 1] = np.arange(1, count + 1)
    return tokens, take(numbers, in_front + 1), depths


def _tree(tokens: Array, parents: Array, depths: Array, scores: Array) -> DraftTree:
    deepest = int(depths.max())
    grown = [torch.from_numpy(part) for part in (tokens, parents, depths, _ancestors(parents, deepest), scores)]
    return DraftTree(grown[0], grown[1], grown[2], grown[3], deepest, grown[4])


def _ancestors(parents: Array, deepest: int) -> Array:
    """[B, N, N] of `parents` [B, N], -1 for the root and for empty nodes; no node lies deeper than `deepest`."""
    nodes = np.arange(parents.shape[1])
    above = np.where(parents < 0, nodes, parents)  # these stay where they are
    ancestors = np.zeros((*parents.shape, len(nodes)), dtype=bool)
    rows = np.arange(len(parents))[:, None]
    up = nodes[None]
    for _ in range(deepest):
        ancestors[rows, nodes, up] = True
        up = take(above, up)
    ancestors[rows, nodes, up] = True
    return ancestors


def _bounded(steps: Array) -> Array:
    """As `tree.bounded`."""
    return np.where(steps > -inf, np.minimum(np.maximum(steps, FLOOR), -STEP), -inf)


def take(values: Array, places: Array) -> Array:
    """Of `values` [B, n, ...], those at `places` [B, m] of each row: [B, m, ...]."""
    if len(values) == 1:
        return values[0].take(places, axis=0)
    return values[np.arange(len(values))[:, None], places]


def _largest(scores: Array, count: int) -> Array:
    """Places [B, `count`] of each row's largest scores [B, n], in any order."""
    most = scores.shape[1]
    if count < most:
        return scores.argpartition(most - count, axis=1)[:, most - count :]
    return np.arange(most) + np.zeros((len(scores), 1), dtype=np.int64)
