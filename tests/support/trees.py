"""Random candidates for draft trees, and the paths that a tree holds."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_dart import TreeConfig
from hf_dart.decoding import walk
from hf_dart.decoding.processors import scores_alone
from hf_dart.trees.copies import NOTHING, Copies, CopyLevels, with_copies
from hf_dart.trees.scores import Candidates, DraftScores
from hf_dart.trees.tree import DraftTree

DrafterScores = DraftScores(TreeConfig())
"""A drafter's scores as they are."""


def paths(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    """The drafted tokens from the root to each real node, by the ancestor masks."""
    real = (tree.parents[row] >= 0).nonzero().flatten().tolist()
    found = [tuple(tree.tokens[row][tree.ancestors[row, node]].tolist()[1:]) for node in real]
    assert len(set(found)) == len(found), "a path occurs twice"
    return set(found)


def chain_of(tokens: list[int], chance: float) -> Copies:
    """A copy: `tokens` in a row, each with the log-probability `chance` after the one before."""
    depths = list(range(1, len(tokens) + 1))
    return Copies(tokens, [depth - 2 for depth in depths], depths, [chance * depth for depth in depths])


def random_copies(random: Random, nodes: int, tokens: int) -> Copies:
    """A random tree of copied tokens below `tokens`, at most `nodes` of them, the likeliest ones first."""
    paths: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(nodes):
        above = random.choice([*paths][-4:])
        paths.setdefault((*above, random.randrange(tokens)), paths[above] - 0.01 - random.random())
    _, *drafted = sorted(paths, key=lambda path: -paths[path])
    parents = [drafted.index(path[:-1]) if path[1:] else -1 for path in drafted]
    return Copies([path[-1] for path in drafted], parents, [*map(len, drafted)], [paths[path] for path in drafted])


def copied_steps(copies: CopyLevels, row: int) -> dict[tuple[int, ...], float]:
    """The copied paths of a row, and the log-probability of the last token of each after those before it."""
    found: dict[int, tuple[int, ...]] = {-1: ()}
    steps: dict[tuple[int, ...], float] = {}
    for column, (token, parent) in enumerate(zip(copies.tokens[row], copies.parents[row], strict=True)):
        if parent >= -1:
            found[column] = (*found[int(parent)], int(token))
            above = copies.totals[row, parent] if parent >= 0 else 0.0
            steps[found[column]] = float(copies.totals[row, column] - above)
    return steps


def candidates_of(
    tokens: Tensor, steps: Tensor, *, history: Tensor | None = None, formula: Any = DrafterScores,
    copies: list[Copies] | None = None, deepest: list[int] | None = None,
) -> Candidates:  # fmt: skip
    """Candidates [B, d, K] with log-scores [B, d, K], or [B, d, K, K] of each after each of the depth before.

    A history is [B, C], and None are roots 100, 101, ...; copies of each row are not yet among `tokens`.
    """
    batch = len(tokens)
    history = torch.arange(100, 100 + batch)[:, None] if history is None else history
    steps = steps[:, :, None] if steps.ndim == 3 else steps
    levels = CopyLevels.of(copies or [NOTHING] * batch)
    if levels.tokens.size and tokens.shape[1]:
        width = tokens.shape[2]
        tokens, _ = with_copies(tokens, tokens.float(), torch.from_numpy(levels.by_depth(tokens.shape[1])))
        more = tokens.shape[2] - width
        steps = torch.nn.functional.pad(steps, (0, more, 0, more if steps.shape[2] > 1 else 0), value=-inf)
    return Candidates(history.numpy(), tokens.numpy(), steps.double().numpy(), formula, levels, deepest)


def plainly(candidates: Candidates, row: int, nodes: int, beam: int) -> dict[tuple[int, ...], float]:
    """The tree of a row by writing all paths down, and the score of each: every path times every token after it.

    It has at most so many `nodes`, its root included, and `beam` paths go on at each depth.
    """
    tokens, copied = candidates.tokens[row], copied_steps(candidates.copies, row)
    history, limits, batch = candidates.history, candidates.deepest, len(candidates.tokens)
    deepest = max(len(tokens), *map(len, copied), 0)
    score = candidates.formula.scorer(candidates.tokens, candidates.steps)
    pool: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], tuple[float, int]] = {(): (0.0, 0)}
    for depth in range(deepest if limits is None else min(deepest, limits[row])):
        extended: dict[tuple[int, ...], tuple[float, int]] = {}
        for path, (above, column) in frontier.items():
            if depth >= len(tokens):
                after = {way: step for way, step in copied.items() if way[:-1] == path}
                extended |= {way: (above + step, 0) for way, step in after.items()}
                continue
            text = np.array([*history[row], *path])[-history.shape[1] :]
            steps = score(depth, np.full((batch, 1), column), np.tile(text, (batch, 1, 1)))[row, 0]
            for place, token in enumerate(tokens[depth].tolist()):
                extended[(*path, token)] = above + max(steps[place], copied.get((*path, token), -inf)), place
        extended = {path: found for path, found in extended.items() if found[0] > -inf}
        pool |= {path: score for path, (score, _) in extended.items()}
        ends: set[int] = set()
        if candidates.ending is not None and depth < len(tokens):
            ends = set(tokens[depth][candidates.ending[row, depth]].tolist())
        going_on = [item for item in extended.items() if item[0][-1] not in ends]
        if depth < len(tokens):
            going_on = sorted(going_on, key=lambda item: -item[1][0])[:beam]
        frontier = dict(going_on)
    return dict(sorted(pool.items(), key=lambda item: -item[1])[: nodes - 1])


def random_draft(batch: int, depth: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Candidates [B, d, K], distinct within a depth, and scores [B, d, K, K] of each after each of the depth before."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.rand(batch, depth, 50, generator=generator).argsort(-1)[..., :width]
    steps = (2 * torch.randn(batch, depth, width, width, generator=generator)).log_softmax(-1)
    steps[:, 0] = steps[:, 0, :1]  # the root is before the first
    return tokens, steps


def choose_everywhere(patch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, at all nodes of a tree at once, where the processors of a call read scores alone."""
    patch.setattr(walk, "chooses_everywhere", lambda processors, device: scores_alone(processors))
