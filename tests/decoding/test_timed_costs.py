"""What rounds cost: a draft as it was timed, where nobody said; and nothing found is nothing grown."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from support.tiny import prompts, tiny_head, tiny_target
from torch import Tensor

from hf_dart import TreeConfig
from hf_dart.decoding.costs import KEPT, LEAST, RoundCosts, Timings
from hf_dart.decoding.experience import Experience
from hf_dart.decoding.grow import TreeGrower
from hf_dart.drafters.lookup import LookupDrafter

ESTIMATED = TreeConfig(draft_cost=0.25, node_cost=0.1)


@pytest.fixture(autouse=True)
def untimed() -> None:
    """Here drafts are timed, which they are in no other test."""


class Clock:
    """Seconds by phase, as `DraftStats` counts them."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("prefill", "draft", "grow", "verify", "walk"), 7.0)

    def round(self, draft: float, grow: float, verify: float) -> dict[str, float]:
        for name, spent in (("draft", draft), ("grow", grow), ("verify", verify)):
            self.seconds[name] += spent
        return self.seconds


def played(timings: Timings | None, rounds: list[tuple[float, float, float]]) -> RoundCosts:
    """Costs after rounds of two rows and trees of three nodes that took so long to draft, grow and verify."""
    costs, clock = RoundCosts(ESTIMATED, "cpu", timings), Clock()
    costs.count(clock.seconds, 2, 1, 0, False)  # from here on
    for spent in rounds:
        costs.count(clock.round(*spent), 2, 3, 2, True)
    return costs


def test_a_draft_costs_what_it_took_beside_the_forward() -> None:
    # Two rows of three nodes cost 1 + 0.1 + 2 * 2 * 0.1 of a plain round: 1.5 s are what 1 s is without a draft.
    costs = played({}, [(0.4, 0.1, 1.5)] * LEAST)
    assert costs(2).draft == pytest.approx(0.5), "growing its trees included"
    assert costs(2, drafted=False).draft == 0
    assert costs(2).points == RoundCosts(ESTIMATED, "cpu")(2).points, "what nodes cost is not timed"
    slower = played({}, [(4.0, 1.0, 15.0)] * LEAST)
    assert slower(2).draft == pytest.approx(0.5), "a busy machine slows both"


def test_the_median_counts_and_of_enough_rounds() -> None:
    assert played({}, [(9.0, 0.0, 1.5)] * (LEAST - 1))(2).draft == 0.25
    late = [(0.4, 0.0, 1.5)] * 4 + [(50.0, 0.0, 1.5), (0.4, 0.0, 0.0)]
    assert played({}, late)(2).draft == pytest.approx(0.4)
    timings: Timings = {}
    played(timings, [(0.4, 0.0, 1.5)] * 100)
    assert len(timings[2, None]) == KEPT


def test_later_calls_know_what_earlier_ones_took() -> None:
    timings: Timings = {}
    played(timings, [(0.8, 0.1, 1.5)] * 8)
    later = RoundCosts(ESTIMATED, "cpu", timings)
    later.begin(2)
    assert later(2).draft == pytest.approx(0.9)
    other = RoundCosts(ESTIMATED, "cpu", timings)
    other.begin(4)  # rows
    assert other(4).draft == 0.25


def test_without_timings_costs_are_as_given() -> None:
    assert played(None, [(0.7, 0.1, 1.5)] * 8)(2).draft == 0.25


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
    head.experience.timings[1, None] = (9.0,) * LEAST
    head.bind(tiny_target("qwen3"))
    assert head.experience == Experience()
