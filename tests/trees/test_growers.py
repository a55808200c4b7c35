"""Growing trees: the best nodes, by a naive search."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import candidates_of, paths, plainly, random_copies, random_draft

from hf_dart.trees.costs import RoundCost
from hf_dart.trees.on_host import grow_on_host
from hf_dart.trees.tree import DraftTree


class OfTheWholePath:
    """Scores that depend on all drafted tokens and on the three before them."""

    context = 8

    def scorer(self, tokens: Any, steps: Any) -> Any:
        def score(depth: int, columns: Any, paths: Any) -> Any:
            found = [
                [[self.one(path, t, float(s)) for t, s in zip(row, alone, strict=True)] for path in ends]
                for ends, row, alone in zip(paths.tolist(), tokens[:, depth].tolist(), steps[:, depth, 0], strict=True)
            ]
            return np.array(found)

        return score

    @staticmethod
    def one(path: list[int], token: int, alone: float) -> float:
        return alone - 1e-3 - ((sum((i + 1) * t for i, t in enumerate(path[-8:])) * 7 + token * 3) % 11) / 4


@pytest.mark.parametrize("limit", [None, [5, 2]])
def test_a_score_sees_the_path(limit: list[int] | None) -> None:
    tokens, table = random_draft(2, 5, 4, 7)
    history = torch.tensor([[0, 0, 0, 0, 0, 3, 5, 8], [0, 0, 0, 0, 0, 13, 21, 34]])
    candidates = candidates_of(tokens, table[:, :, 0], history=history, formula=OfTheWholePath(), deepest=limit)
    tree = grow_on_host(candidates, nodes=24, beam=6)
    assert tree.tokens[:, 0].tolist() == [8, 34]
    for row in range(2):
        assert paths(tree, row) == set(plainly(candidates, row, 24, 6))


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**31), depth=st.integers(0, 5), width=st.integers(1, 5), nodes=st.integers(1, 40),
    pairs=st.booleans(), lengths=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    limits=st.none() | st.lists(st.integers(-1, 9), min_size=3, max_size=3), narrow=st.booleans(), ends=st.booleans(),
)  # fmt: skip
def test_trees_are_those_of_a_plain_search(
    seed: int,
    depth: int,
    width: int,
    nodes: int,
    pairs: bool,
    lengths: list[int],
    limits: Any,
    narrow: bool,
    ends: bool,
) -> None:
    """Nodes, scores and masks; with scores of neighbours, copies deeper than the drafter, limits, and ends of texts."""
    tokens, steps = random_draft(3, max(depth, 1), width, seed)
    tokens, steps = tokens[:, :depth], (steps if pairs else steps[:, :, 0])[:, :depth]
    random = Random(seed)
    # Some of the copied tokens are drafted, too.
    copies = [random_copies(random, length, random.choice([3, 50])) for length in lengths]
    candidates = candidates_of(tokens, steps, copies=copies, deepest=limits)
    if ends:
        candidates = replace(candidates, ending=candidates.tokens % 3 == 0)
    # A beam that is no limit: paths of which no node can be among the best are left out.
    beam = 3 if narrow else 10**6
    tree = grow_on_host(candidates, nodes=nodes, beam=beam)
    assert tree.scores is not None
    assert (tree.parents[:, 0] == -1).all()
    for row in range(3):
        wanted = plainly(candidates, row, nodes, beam)
        assert paths(tree, row) == set(wanted)
        scores = sorted(tree.scores[row][tree.parents[row] >= 0].tolist())
        assert scores == pytest.approx(sorted(wanted.values()))
        assert not ends or all(token % 3 for path in paths(tree, row) for token in path[:-1][:depth])
    assert tree.max_depth == int(tree.depths.max())


def test_certain_tokens_keep_their_parents() -> None:
    """Scores of 0 (probability 1) at every depth: children must not crowd out their own parents."""
    tokens, _ = random_draft(1, 6, 3, 2)
    scores = torch.zeros(1, 6, 3)
    scores[..., 1:] = -inf
    tree = grow_on_host(candidates_of(tokens, scores), nodes=4, beam=3)
    assert paths(tree, 0) == {tuple(tokens[0, : i + 1, 0].tolist()) for i in range(3)}


def test_paths_stay_whole_however_low_their_scores() -> None:
    scores = torch.tensor([0.0, -5000.0, -1e7, torch.nan]).repeat(1, 9, 1)
    tree = grow_on_host(candidates_of(torch.arange(4).repeat(1, 9, 1), scores), nodes=200, beam=40)
    assert (tree.parents[0] < torch.arange(tree.size)).all()
    assert 3 not in tree.tokens[0, 1:]


# ---- the size ---------------------------------------------------------------------------------------------


def test_levels_that_cost_are_as_few_as_pay() -> None:
    depths = set()
    for seed in range(12):
        tokens = torch.arange(2, 22).view(1, 5, 4).repeat(2, 1, 1)
        table = torch.randn(2, 5, 1, 4, generator=torch.Generator().manual_seed(seed)).sub(0.5).log_softmax(-1)
        level = 0.02 * seed
        cost = RoundCost(0.1, np.linspace(1, 1.5, 20), level)

        def rate(tree: DraftTree, cost: RoundCost = cost) -> float:
            return float(tree.scores.exp().sum()) / cost.of(tree.size, tree.max_depth)

        rates = []
        for deepest in range(1, 6):
            limited = candidates_of(tokens, table, deepest=[deepest] * 2)
            rates += [rate(grow_on_host(limited, nodes=nodes)) for nodes in range(1, 21)]
        tree = grow_on_host(candidates_of(tokens, table), nodes=20, cost=cost)
        assert rate(tree) == pytest.approx(max(rates), rel=1e-9)
        depths.add(tree.max_depth)
    assert len(depths) > 2


def test_trees_grow_for_the_rows_that_count() -> None:
    """One row's draft is sure, the other's is not: nodes are worth their cost if the sure row is not far ahead."""
    candidates = candidates_of(torch.tensor([[[3, 4]]] * 2), torch.tensor([[[-0.05, -5.0]], [[-5.0, -6.0]]]))
    cost = RoundCost(0.0, 1 + 0.1 * np.arange(4))
    for parts, size in (([0.5, 0.5], 2), ([1.0, 0.0], 2), ([0.02, 0.98], 1), (None, 2)):
        assert grow_on_host(candidates, nodes=4, cost=cost, weights=parts).size == size
