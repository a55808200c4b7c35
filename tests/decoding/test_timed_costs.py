"""What rounds cost: drafts and nodes as they were timed, where nobody said; and nothing found is nothing grown."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest
import torch
from support.compare import assert_identical
from support.tiny import prompts, tiny_head, tiny_target
from torch import Tensor

from hf_dart import TreeConfig
from hf_dart.decoding.costs import BLOCK, KEPT, LEAST, RoundCosts, Shown, Timed, Timings, estimated_costs
from hf_dart.decoding.grow import TreeGrower
from hf_dart.drafters.lookup import LookupDrafter

ESTIMATED = TreeConfig(draft_cost=0.25, node_cost=0.1)


@pytest.fixture(autouse=True)
def untimed() -> None:
    """Here rounds are timed, which they are in no other test."""


class Clock:
    """Seconds by phase, as `DraftStats` counts them."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("prefill", "draft", "grow", "verify", "walk"), 7.0)

    def round(self, draft: float, grow: float, verify: float) -> dict[str, float]:
        for name, spent in (("draft", draft), ("grow", grow), ("verify", verify)):
            self.seconds[name] += spent
        return self.seconds


def played(timings: Timings, rounds: list[tuple[float, float, float]]) -> RoundCosts:
    """Costs after rounds of two rows and trees of three nodes that took so long to draft, grow and verify."""
    costs, clock = RoundCosts(ESTIMATED, "cpu", timings, {"draft_cost"}), Clock()
    costs.count(clock.seconds, 2, 1, 0, False)  # from here on
    for spent in rounds:
        costs.count(clock.round(*spent), 2, 3, 2, True)
    return costs


def test_a_draft_costs_what_it_took_beside_the_forward() -> None:
    # Two rows of three nodes cost 1 + 0.1 + 2 * 2 * 0.1 of a plain round: 1.5 s are what 1 s is without a draft.
    costs = played(Timings(), [(0.4, 0.1, 1.5)] * LEAST)
    assert costs(2).draft == pytest.approx(0.5), "growing its trees included"
    assert costs(2, drafted=False).draft == 0
    assert costs(2).points == RoundCosts(ESTIMATED, "cpu")(2).points, "what nodes cost is not timed"
    slower = played(Timings(), [(4.0, 1.0, 15.0)] * LEAST)
    assert slower(2).draft == pytest.approx(0.5), "a busy machine slows both"


def test_the_median_counts_and_of_enough_rounds() -> None:
    assert played(Timings(), [(9.0, 0.0, 1.5)] * (LEAST - 1))(2).draft == 0.25
    late = [(0.4, 0.0, 1.5)] * 4 + [(50.0, 0.0, 1.5), (0.4, 0.0, 0.0)]
    assert played(Timings(), late)(2).draft == pytest.approx(0.4)
    timings = Timings()
    played(timings, [(0.4, 0.0, 1.5)] * 100)
    assert len(timings.drafts[2, None]) == KEPT


def test_later_calls_know_what_earlier_ones_took() -> None:
    timings = Timings()
    played(timings, [(0.8, 0.1, 1.5)] * 8)
    later = RoundCosts(ESTIMATED, "cpu", timings, {"draft_cost"})
    later.begin(2)
    assert later(2).draft == pytest.approx(0.9)
    other = RoundCosts(ESTIMATED, "cpu", timings, {"draft_cost"})
    other.begin(4)  # rows
    assert other(4).draft == 0.25


def test_given_costs_are_as_given() -> None:
    costs, clock = RoundCosts(ESTIMATED, "cpu", Timings()), Clock()
    for _ in range(2 * BLOCK):
        costs.count(clock.round(9.0, 9.0, 1.5), 2, 3, 2, True)
    assert costs(2) == RoundCosts(ESTIMATED, "cpu")(2)


@pytest.mark.parametrize(
    ("fields", "device", "by_levels", "names"),
    [
        ({}, "cpu", False, {"draft_cost", "node_cost"}),
        ({}, "cpu", True, {"draft_cost", "node_cost", "level_cost"}),
        ({"draft_cost": 0.1, "level_cost": 0.1}, "cpu", True, {"node_cost"}),
        ({"node_cost": 0.1}, "cpu", True, {"draft_cost"}),
        ({"verify_costs": ((1, 1), (2, 2))}, "cpu", True, {"draft_cost"}),
        ({"nodes": 8}, "cpu", False, set()),
        ({}, "cuda", False, set()),
    ],
)
def test_what_is_estimated(fields: dict[str, Any], device: str, by_levels: bool, names: set[str]) -> None:
    assert estimated_costs(TreeConfig(**fields), device, by_levels) == names


TRUE = (0.25, 0.012, 0.08)


def rounds_of(sizes: list[int], random: Random) -> list[Timed]:
    """A block that takes what `TRUE` says, a few per cent more or less, on a slow machine."""
    rounds = []
    for _ in range(BLOCK):
        nodes = random.choice(sizes)
        levels = random.randint(1, 4) if nodes > 1 else 0
        cost = 1 + TRUE[0] * (nodes > 1) + TRUE[1] * (nodes - 1) + TRUE[2] * levels
        rounds.append((nodes, levels, 0.3 * cost * random.uniform(0.95, 1.05)))
    return rounds


def test_verifying_costs_what_fits_the_rounds() -> None:
    random, shown = Random(0), Shown.nothing(1, 0.25)
    for _ in range(12):
        shown = shown.after(rounds_of([1, 2, 6, 12, 30], random), 1, True)
    cost = shown.cost
    assert cost.tree == pytest.approx(TRUE[0], abs=0.05)
    assert cost.node == pytest.approx(TRUE[1], abs=0.004)
    assert cost.level == pytest.approx(TRUE[2], abs=0.03)


@pytest.mark.parametrize("sizes", [[1], [8]])
def test_what_rounds_cannot_tell_stays_as_it_was(sizes: list[int]) -> None:
    shown = Shown.nothing(2, 0.0)
    known = shown.cost
    for _ in range(5):
        shown = shown.after([(nodes, 3, 0.3) for nodes in sizes * BLOCK], 2, False)
    for name in ("tree", "node", "level"):
        assert getattr(shown.cost, name) == pytest.approx(getattr(known, name), abs=1e-6)


def test_what_no_line_fits_shows_nothing() -> None:
    """Costs are those of a plain round, and such a line has it take no time."""
    known = Shown.nothing(1, 0.0)
    shown = known.after([(nodes, 1, float(nodes - 7)) for nodes in (8, 9, 10, 11)] * (BLOCK // 4), 1, False)
    assert shown.cost == known.cost


def test_late_rounds_count_little_and_a_given_level_cost_stays() -> None:
    rounds = rounds_of([1, 12], Random(1))
    late = [(*timed[:2], 20 * timed[2] if place == 5 else timed[2]) for place, timed in enumerate(rounds)]
    shown, beside = (Shown.nothing(1, TRUE[2]).after(block, 1, False).cost for block in (rounds, late))
    assert 1 + shown.tree + 11 * shown.node == pytest.approx(1 + TRUE[0] + 11 * TRUE[1], abs=0.1)
    assert 1 + beside.tree + 11 * beside.node == pytest.approx(1 + shown.tree + 11 * shown.node, abs=0.1)
    assert beside.level == pytest.approx(TRUE[2])


def test_nodes_cost_what_rounds_have_shown_in_this_call_and_later_ones() -> None:
    timings, clock = Timings(), Clock()
    estimated = estimated_costs(TreeConfig(), "cpu", False)
    costs = RoundCosts(TreeConfig(), "cpu", timings, estimated)
    before = costs(2)
    costs.count(clock.seconds, 2, 1, 0, False)  # from here on
    for number in range(8 * BLOCK):
        nodes = (1, 4, 9)[number % 3]
        costs.count(clock.round(0.0, 0.0, 0.02 * (1 + 0.5 * (nodes > 1) + 0.01 * (nodes - 1))), 2, nodes, 1, False)
    assert (before.of(2), before.of(9)) == pytest.approx((1.36, 1.78)), "0.2 more for the draft"
    assert (costs(2).of(2), costs(2).of(9)) == pytest.approx((1.71, 1.78), abs=0.05)
    assert costs(2).level == 0
    later = RoundCosts(TreeConfig(), "cpu", timings, estimated)
    assert (later(2), later(4)) == (costs(2), RoundCosts(TreeConfig(), "cpu")(4))


def test_trees_that_seemed_dear_are_tried_again() -> None:
    """Where no tree is worth it, rounds show nothing of trees."""
    timings, clock = Timings(), Clock()
    costs = RoundCosts(TreeConfig(), "cpu", timings, estimated_costs(TreeConfig(), "cpu", False))
    costs.count(clock.seconds, 1, 1, 0, False)
    for nodes in [1, 8] * (2 * BLOCK):
        costs.count(clock.round(0.0, 0.0, 0.3 if nodes > 1 else 0.1), 1, nodes, 1, False)
    assert costs(1, drafted=False).of(8) > 2.3, "a neighbour was busy then"
    for _ in range(40 * BLOCK):
        costs.count(clock.round(0.0, 0.0, 0.1), 1, 1, 0, False)
    assert costs(1, drafted=False).of(8) < 1.9


def test_calls_learn_what_nodes_cost() -> None:
    target = tiny_target("qwen3")
    head = tiny_head(target)
    options = {"do_sample": False, "max_new_tokens": 6 * BLOCK, "tree_config": TreeConfig(lookup=0)}
    assert_identical(target, head, prompts([7, 5]), **options)
    assert (2, 0.0) in head.pace_records[""].timings.verify


def test_a_slow_drafter_pauses_unless_its_cost_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3")
    head = tiny_head(target)
    propose = head.propose

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.15)  # a hundred forwards of this target
        return propose(*args, **kwargs)

    monkeypatch.setattr(head, "propose", slow)
    inputs = prompts([7])
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    stock = target.generate(**inputs, **options)
    paused = {}
    for cost in (0.0, None):
        tree = TreeConfig(lookup=0, depth=2, node_cost=0.0, draft_cost=cost)
        assert torch.equal(target.generate(**inputs, **options, assistant=head, tree_config=tree), stock)
        paused[cost] = head.last_stats.paused_rounds
    assert paused[0.0] == 0 < paused[None]


@pytest.mark.parametrize("nodes", [None, 6])
def test_copies_that_cannot_pay_grow_nothing(nodes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound refuses no tree that growth would find worth it."""
    grown: list[bool] = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        texts = [torch.randint(3, (14,), generator=generator).tolist() for _ in range(1 + seed % 3)]
        config = TreeConfig(nodes=nodes, node_cost=0.05 + 0.1 * (seed % 4), lookup=8)
        trees: list[Tensor] = []
        for bounded in (True, False):
            grower = TreeGrower(LookupDrafter(config), config, [], texts, torch.device("cpu"))  # type: ignore[arg-type]
            if not bounded:
                monkeypatch.setattr(grower, "_may_pay", lambda *_: True)
            trees.append(grower(None, None, [6] * len(texts)).tokens)
        assert torch.equal(*trees)
        grown.append(trees[0].shape[1] > 1)
    assert any(grown)
    assert not all(grown)


def test_a_drafter_bound_to_another_target_forgets_what_it_has_learnt() -> None:
    target = tiny_target("qwen3")
    head = tiny_head(target)
    head.pace_records["kind"] = 1
    head.bind(tiny_target("qwen3"))
    assert head.pace_records == {}
