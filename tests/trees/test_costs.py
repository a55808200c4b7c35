"""Costs of rounds: given as points, kept with a head, followed by the size of trees, measured on request."""

from __future__ import annotations

from math import exp
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.compare import assert_identical
from support.tiny import prompts, tiny_head, tiny_target
from support.trees import candidates_of, paths, random_draft

from hf_dart import DartHead, TreeConfig
from hf_dart.trees.costs import RoundCost, interpolated
from hf_dart.trees.on_host import grow_on_host

POINTS = ((1.0, 1.0), (4.0, 1.3), (8.0, 1.3), (16.0, 2.1))


def measured(draft: float, points: Any, batch: int, most: int = 64) -> RoundCost:
    """Costs of rounds by costs of forwards."""
    return TreeConfig(verify_costs=points, draft_cost=draft).round_cost(batch, "cpu", most=most)


def test_straight_lines_between_points() -> None:
    sizes, costs = zip(*POINTS, (2.5, 1.15), (6.0, 1.3), (12.0, 1.7), (24.0, 2.9), strict=True)
    assert interpolated(POINTS, sizes).tolist() == pytest.approx(costs)


def test_steps_may_fall() -> None:
    """Products of 4 rows may take longer than those of 16; nothing is guessed to fall on."""
    points = TreeConfig(verify_costs=((1, 1), (4, 2.5), (16, 1.7))).verify_costs
    assert interpolated(points, (4, 10, 16, 64)).tolist() == pytest.approx([2.5, 2.1, 1.7, 1.7])
    cost = measured(0.0, points, 1)
    candidates = candidates_of(*random_draft(1, 4, 4, 0))
    assert grow_on_host(candidates, nodes=16, cost=cost).size not in (2, 3, 4)


@pytest.mark.parametrize("batch", [1, 2, 3, 40])
def test_a_batch_shares_its_forwards(batch: int) -> None:
    cost = measured(0.4, POINTS, batch)
    assert cost.of(1) == pytest.approx(1.4)
    for nodes in (2, 3, 5, 9, 30):
        assert cost.of(nodes) == pytest.approx(0.4 + interpolated(POINTS, batch * nodes) / interpolated(POINTS, batch))


@pytest.mark.parametrize(
    "points", [[(1, 1)], [(2, 1), (3, 2)], [(1, 1), (1, 2)], [(1, 1), (2, 0)], [(1, 1), (2,)], 7, [(1, 1), (2, "x")]]
)
def test_what_is_no_cost(points: Any) -> None:
    with pytest.raises(ValueError, match=r"verify_costs is .*; give two or more pairs of tokens and cost"):
        TreeConfig(verify_costs=points)


def test_the_size_is_that_of_most_tokens_per_cost() -> None:
    """Found here by trying every size; costs rise in stairs, so that the rate has several peaks."""
    random = Random(0)
    sizes = set()
    for seed in range(25):
        candidates = candidates_of(*random_draft(2, 3, 4, seed))
        costs = [1.0]
        for _ in range(4):
            costs.append(costs[-1] + random.choice([0.0, 0.1, 0.6]))
        cost = measured(random.choice([0.0, 0.5]), tuple(zip((1, 4, 10, 20, 48), costs, strict=True)), 2)
        if seed % 2:  # and steps may fall
            cost.verify[random.randrange(2, 9) :] -= 0.4
        rates = []
        for nodes in range(1, 24):
            tree = grow_on_host(candidates, nodes=nodes)
            expected = sum(exp(score) for row in tree.scores.tolist() for score in row)
            rates.append(expected / cost.of(nodes))
        best = grow_on_host(candidates, nodes=23, cost=cost)
        sizes.add(best.size)
        assert rates[best.size - 1] == pytest.approx(max(rates), rel=1e-9)
        assert all(paths(best, row) == paths(grow_on_host(candidates, nodes=best.size), row) for row in range(2))
    assert len(sizes) > 4


def test_every_look_at_a_draft_costs_a_draft() -> None:
    config = TreeConfig(draft_cost=0.3, refine=2, node_cost=0.0)
    assert config.round_cost(1, "cpu").of(5) == pytest.approx(1.9)
    assert config.round_cost(1, "cpu", drafted=False).of(5) == 1


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sampled"])
def test_costs_change_no_token(tmp_path: Path, options: dict[str, Any]) -> None:
    """Costs are kept with the head, and equal calls of one that was just loaded make equal rounds."""
    target = tiny_target("llama")
    tree = {"verify_costs": [[1, 1], [8, 1.01], [64, 1.5]], "draft_cost": 0.0}
    tiny_head(target, tree=tree).save_pretrained(tmp_path)
    committed = []
    for _ in range(2):
        head = DartHead.from_pretrained(str(tmp_path), target=target)
        assert head.tree_config.verify_costs == ((1, 1), (8, 1.01), (64, 1.5))
        assert_identical(target, head, prompts([9, 3]), **options, max_new_tokens=20)
        committed.append((head.last_stats.committed, head.last_stats.drafted))
    assert committed[0] == committed[1]
    assert committed[0][1] > 0
