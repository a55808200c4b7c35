"""Growing trees: the best nodes, by a naive search and by DART's own; their depths, masks, chains and padding."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import candidates_of, paths, plainly, random_copies, random_draft
from surveys.dart_search import NODES, Cases, trees

from hf_dart.trees.copies import tree_of_copies
from hf_dart.trees.costs import RoundCost
from hf_dart.trees.on_host import grow_on_host
from hf_dart.trees.tree import DraftTree


@settings(max_examples=120, deadline=None, derandomize=True)
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
    if depth:
        tree = grow_on_host(candidates, nodes=nodes, beam=beam)
    else:
        limits = limits or [9] * 3
        shallow = [
            [node for node, depth in enumerate(one.depths) if depth <= most]
            for one, most in zip(copies, limits, strict=True)
        ]
        allowed = [one.only(kept) for one, kept in zip(copies, shallow, strict=True)]
        tree = tree_of_copies([100, 101, 102], allowed, nodes - 1)
        assert tree.tokens[:, 0].tolist() == [100, 101, 102]
        assert tree.size == nodes
    assert tree.scores is not None
    assert (tree.parents[:, 0] == -1).all()
    for row in range(3):
        wanted = plainly(candidates, row, nodes, beam)
        assert paths(tree, row) == set(wanted)
        scores = sorted(tree.scores[row][tree.parents[row] >= 0].tolist())
        assert scores == pytest.approx(sorted(wanted.values()))
        assert not ends or all(token % 3 for path in paths(tree, row) for token in path[:-1][:depth])
    assert tree.max_depth == int(tree.depths.max())


def test_paths_stay_whole() -> None:
    """Scores of 0 (probability 1) at every depth: children must not crowd out their own parents; nor very low ones."""
    tokens, _ = random_draft(1, 6, 3, 2)
    scores = torch.zeros(1, 6, 3)
    scores[..., 1:] = -inf
    tree = grow_on_host(candidates_of(tokens, scores), nodes=4, beam=3)
    assert paths(tree, 0) == {tuple(tokens[0, : i + 1, 0].tolist()) for i in range(3)}

    scores = torch.tensor([0.0, -5000.0, -1e7, torch.nan]).repeat(1, 9, 1)
    tree = grow_on_host(candidates_of(torch.arange(4).repeat(1, 9, 1), scores), nodes=200, beam=40)
    assert (tree.parents[0] < torch.arange(tree.size)).all()
    assert 3 not in tree.tokens[0, 1:]


def test_the_trees_are_those_of_darts_own_search(tmp_path: Path) -> None:
    """By `TreeConfig.paper()`, of drafts of the packaged head.

    `examples/experiments/surveys/dart_search.py` recorded them, and compares many more where DART's code is at hand. In
    every other case the text is likely to end at each depth: nothing grows after the end there, and nothing here.
    """
    cases, wanted = Cases.load(Path(__file__).parent / "dart_search.safetensors")
    assert trees(cases, tmp_path) == wanted
    assert all(len(tree) == NODES for tree in wanted)
    ends = [sum(cases.end in path for path in tree) for tree in wanted]
    assert len(wanted) == 16
    assert sum(count > 1 for count in ends) >= 8
    assert max(len(path) for tree in wanted for path in tree) > 5


def test_depths_and_ancestors() -> None:
    tokens, table = random_draft(4, 6, 5, 9)
    grown = grow_on_host(candidates_of(tokens, table, deepest=[6, 2, 0, 1]), nodes=40, beam=7)
    for tree in (grown, grown.padded(48)):
        assert int(tree.depths.max()) <= tree.max_depth
        for row in range(4):
            parents = tree.parents[row].tolist()
            for node in range(tree.size):
                above = [node]
                while parents[above[-1]] >= 0:
                    above.append(parents[above[-1]])
                assert tree.ancestors[row, node].nonzero().flatten().tolist() == sorted(above)
                assert int(tree.depths[row, node]) == len(above) - 1
        assert (tree.parents[2] == -1).all(), "a row that may not draft has its root only"
    assert (tree.tokens[:, 40:] == tree.tokens[:, :1]).all()
    assert (tree.parents[:, 40:] == -1).all()
    assert (tree.scores[:, 40:] == -inf).all()
    assert grown.padded(40) is grown
    chain = DraftTree.chain(torch.arange(8).view(2, 4), torch.tensor([4, 2]))
    assert chain.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -1, -1]]
    assert chain.depths.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert chain.ancestors[1].long().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_nodes_and_levels_are_as_few_as_pay() -> None:
    """Found here by trying every number."""
    depths, sizes = set(), set()
    for seed in range(24):
        tokens = torch.arange(2, 22).view(1, 5, 4).repeat(2, 1, 1)
        table = torch.randn(2, 5, 1, 4, generator=torch.Generator().manual_seed(seed)).sub(0.5).log_softmax(-1)
        # Costs follow what nodes bring, but for 1%: any size may be the best, and costs may fall.
        expected = grow_on_host(candidates_of(tokens, table), nodes=20).scores.exp().sum(0).cumsum(0).numpy()
        verify = expected / expected[0] * np.random.default_rng(seed).uniform(0.99, 1.01, 20)
        cost = RoundCost(0.1, verify, 0.02 * (seed // 2))

        def rate(tree: DraftTree, cost: RoundCost = cost) -> float:
            return float(tree.scores.exp().sum()) / cost.of(tree.size, tree.max_depth)

        rates = []
        for deepest in range(1, 6):
            limited = candidates_of(tokens, table, deepest=[deepest] * 2)
            rates += [rate(grow_on_host(limited, nodes=nodes)) for nodes in range(1, 21)]
        tree = grow_on_host(candidates_of(tokens, table), nodes=20, cost=cost)
        assert rate(tree) == pytest.approx(max(rates), rel=1e-9)
        depths.add(tree.max_depth)
        sizes.add(tree.size)
    assert len(depths) > 2
    assert len(sizes) > 4


def test_trees_grow_for_the_rows_that_count() -> None:
    """One row's draft is sure, the other's is not: nodes are worth their cost if the sure row is not far ahead."""
    candidates = candidates_of(torch.tensor([[[3, 4]]] * 2), torch.tensor([[[-0.05, -5.0]], [[-5.0, -6.0]]]))
    cost = RoundCost(0.0, 1 + 0.1 * np.arange(4))
    for parts, size in (([0.5, 0.5], 2), ([1.0, 0.0], 2), ([0.02, 0.98], 1), (None, 2)):
        assert grow_on_host(candidates, nodes=4, cost=cost, weights=parts).size == size
