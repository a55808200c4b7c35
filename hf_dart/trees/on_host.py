"""Draft trees grown on the host, in NumPy.

At each depth the best paths are extended by all candidates; every extension enters one pool, and the nodes with the
largest cumulative score form the tree (DART, arXiv 2601.19278, section 3.3; OPT-Tree and DDTree pose the same problem).
Width 1 gives a chain. Small arrays cost NumPy a fraction of what small tensors cost torch, and on the host a beam can
be as narrow as the scores found so far allow, and a tree no larger than its nodes are worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np
import torch

from hf_dart.trees.copies import CopyLevels
from hf_dart.trees.costs import Array, RoundCost
from hf_dart.trees.scores import Candidates, take
from hf_dart.trees.tree import DraftTree

_OFF = -2  # in the place of a copied node: the path is not one of copied text


class _Level(NamedTuple):
    """Nodes of one depth that were looked at: K tokens after each of W paths.

    After what is drafted, one more level holds the K copied tokens of all greater depths, after each of W paths.
    """

    scores: Array  # [B, W, K] of the paths with the token
    tokens: Array  # [B, K]
    places: Array  # [B, W] of the ends of the paths among the nodes of all levels; -1 for the root


def grow_on_host(
    candidates: Candidates,
    *,
    nodes: int,  # most of each row, the root included
    beam: int | None = None,  # W, how many paths of each depth are extended; None finds the best nodes of all paths
    cost: RoundCost | None = None,  # of the round; None grows to `nodes`
    weights: Sequence[float] | None = None,  # of a token more in each row, beside 1 that each round brings; None: mean
) -> DraftTree:
    """Grow one tree per row on the CPU, all of one size N <= `nodes`; rows that have fewer nodes have empty ones.

    The size is the one at which the tokens expected of the round, over its cost, are most; and so is the number of
    levels, where these have a cost of their own.
    """
    roots = candidates.history[:, -1:]
    with np.errstate(divide="ignore", invalid="ignore"):  # logarithms of missing candidates
        levels = _levels(candidates, nodes - 1, nodes if beam is None else beam) if nodes > 1 else []
    pool = np.concatenate([np.empty((len(roots), 0)), *(level.scores.reshape(len(roots), -1) for level in levels)], 1)
    per_row = np.full(len(roots), 1 / len(roots)) if weights is None else np.array(weights)
    if cost is not None and cost.level:
        depths = _depths(levels, candidates)
        # The nodes down to a depth are the same, however deep the search went on.
        best = [
            _best(np.where(depths <= deepest, pool, -inf), nodes, cost, per_row, deepest)
            for deepest in range(1, int(depths.max(initial=0)) + 1)
        ]
        chosen, scores, _ = max(best, key=lambda tree: tree[2], default=(pool[:, :0].astype(np.int64), pool[:, :0], 0))
    else:
        chosen, scores, _ = _best(pool, nodes, cost, per_row)
    if not chosen.shape[1]:
        return DraftTree.chain(torch.from_numpy(roots.copy()))
    tokens, parents = _look_up(levels, candidates, chosen)
    empty, none = scores == -inf, np.zeros_like(roots)
    grown = (
        np.concatenate([roots, np.where(empty, roots, tokens)], axis=1),
        np.concatenate([none - 1, np.where(empty, -1, parents)], axis=1),
        np.concatenate([none, scores], axis=1),
    )
    return DraftTree.from_parents(*map(torch.from_numpy, grown))


def _levels(candidates: Candidates, count: int, beam: int) -> list[_Level]:
    """Look at nodes depth by depth, among them the best `count` of each row."""
    tokens, copies = candidates.tokens, candidates.copies
    (batch, drafted), longest = tokens.shape[:2], max(tokens.shape[1], len(copies.ends) - 1)
    limits = np.array([longest] * batch if candidates.deepest is None else candidates.deepest)[:, None, None]
    deepest = min(int(limits.max()), longest)
    limited = int(limits.min()) < deepest
    score = candidates.formula.scorer(tokens, candidates.steps)
    paths, columns = candidates.history[:, None], np.zeros((batch, 1), dtype=np.int64)
    best, places = np.zeros((batch, 1)), np.full((batch, 1), -1)
    copied, chances = np.full((batch, 1), -1), copies.steps  # the copied node that each path ends in, by its column
    levels: list[_Level] = []
    size, kept = 0, np.empty((batch, 0))
    for depth in range(min(deepest, drafted)):
        here = tokens[:, depth]
        steps = score(depth, columns, paths)
        taken = _copied(copies, depth, here, copied)
        if taken is not None:
            goes_on = np.take_along_axis(chances, taken.clip(0).reshape(batch, -1), axis=1).reshape(taken.shape)
            steps = np.where(taken >= 0, np.maximum(steps, goes_on), steps)
        if limited:
            steps = np.where(limits > depth, steps, -inf)
        scores = best[..., None] + steps
        levels.append(_Level(scores, here, places))
        if depth + 1 == deepest:
            break
        scores = scores.reshape(batch, -1)
        # A child scores below its parent, so a path outside the current best cannot lead back into it.
        kept = np.concatenate([kept, scores], axis=1)
        if kept.shape[1] >= count:
            kept.partition(kept.shape[1] - count, axis=1)
            kept = kept[:, -count:]
        if candidates.ending is not None:
            scores = np.where(candidates.ending[:, depth, None], -inf, levels[-1].scores).reshape(batch, -1)
        least = kept[:, :1] if kept.shape[1] == count else -inf
        width = min(beam, max(int(np.count_nonzero(row)) for row in scores > least))
        if width == 0:
            return levels
        chosen = _largest(scores, width)
        best, places = take(scores, chosen), chosen + size
        size += scores.shape[1]
        before, columns = np.divmod(chosen, here.shape[1])
        copied = np.full(chosen.shape, _OFF) if taken is None else take(taken.reshape(batch, -1), chosen)
        paths = np.concatenate([take(paths, before)[..., 1:], take(here, columns)[..., None]], axis=-1)
    if drafted < deepest:
        # Copied text goes on after the paths that end in it; [B, W, T] of T deeper nodes.
        first = copies.ends[drafted]
        above = copies.above(drafted)[:, None]
        totals = copies.totals[:, first:] - np.take_along_axis(copies.totals, above[:, 0].clip(0), axis=1)
        steps = np.where(limits[:, 0] >= copies.depths[first:], totals, -inf)
        scores = np.where(copied[..., None] == above, best[..., None] + steps[:, None], -inf)
        levels.append(_Level(scores, copies.tokens[:, first:], places))
    return levels


def _copied(copies: CopyLevels, depth: int, tokens: Array, paths: Array) -> Array | None:
    """Columns [B, W, K] of the copied nodes that tokens [B, K] of a depth are after W paths, or `_OFF`; None for none.

    The paths end in the copied nodes of columns `paths` [B, W]; -1 is the text's end.
    """
    if depth >= len(copies.ends) - 1:
        return None
    start, end = copies.ends[depth], copies.ends[depth + 1]
    same = copies.tokens[:, start:end, None] == tokens[:, None]  # [B, C, K]
    after = copies.parents[:, None, start:end] == paths[..., None]  # [B, W, C]
    both = after[..., None] & same[:, None]
    return np.where(both.any(2), both.argmax(2) + start, _OFF)


def _best(
    pool: Array, nodes: int, cost: RoundCost | None, weights: Array, levels: int = 0
) -> tuple[Array, Array, float]:
    """Places and scores [B, n] of the nodes below the root of the best tree of a pool [B, P] of scores, and its rate.

    A tree that is more than its root has `levels`.
    """
    chosen = _largest(pool, min(nodes - 1, pool.shape[1]))
    chosen = take(chosen, (-take(pool, chosen)).argsort(axis=1, kind="stable"))
    scores = take(pool, chosen)
    gains = weights @ np.exp(scores)
    gains = gains[: np.count_nonzero(gains)]
    size, rate = len(gains), 0.0
    if cost is not None:
        size, expected, spent = cost.best_size(gains, levels)
        rate = expected / spent
    return chosen[:, :size], scores[:, :size], rate


def _depths(levels: list[_Level], candidates: Candidates) -> Array:
    """Depths [P] of all nodes that were looked at."""
    drafted, copies = candidates.tokens.shape[1], candidates.copies
    depths = [np.full(level.scores[0].shape, depth) for depth, level in enumerate(levels, 1)]
    if len(levels) > drafted:
        depths[-1][:] = copies.depths[copies.ends[drafted] :]
    return np.concatenate([np.empty(0, dtype=np.int64), *(depth.ravel() for depth in depths)])


def _look_up(levels: list[_Level], candidates: Candidates, chosen: Array) -> tuple[Array, Array]:
    """Tokens and parents in the tree of the nodes in places `chosen` [B, n], which come in that order."""
    (batch, count), drafted, copies = chosen.shape, candidates.tokens.shape[1], candidates.copies
    widths, paths = (np.array(sizes) for sizes in zip(*(level.scores.shape[:0:-1] for level in levels), strict=True))
    ends = (widths * paths).cumsum()
    level = ends.searchsorted(chosen, side="right")
    path, column = np.divmod(chosen - (ends - widths * paths)[level], widths[level])
    tokens = take(np.concatenate([each.tokens for each in levels], 1), column + (widths.cumsum() - widths)[level])
    parents = take(np.concatenate([each.places for each in levels], 1), path + (paths.cumsum() - paths)[level])
    if len(levels) > drafted:  # in the last one, copied tokens follow others of it
        last, first = level == drafted, copies.ends[drafted]
        copied = np.where(last, first + column, 0)
        above = take(copies.parents, copied) - copied
        parents = np.where(last & (above + copied >= first), chosen + above, parents)
    # Children score less than their parents, so that these are among the chosen; number 0 is the root.
    numbers = np.zeros((batch, int(ends[-1]) + 1), dtype=np.int64)
    numbers[np.arange(batch)[:, None], chosen + 1] = np.arange(1, count + 1)
    return tokens, take(numbers, parents + 1)


def _largest(scores: Array, count: int) -> Array:
    """Places [B, `count`] of each row's largest scores [B, n], in any order."""
    most = scores.shape[1]
    if count < most:
        return scores.argpartition(most - count, axis=1)[:, most - count :]
    return np.arange(most) + np.zeros((len(scores), 1), dtype=np.int64)
