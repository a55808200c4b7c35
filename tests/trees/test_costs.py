"""Costs of rounds: given as points, kept with a head, followed by the size of trees, measured on request."""

from __future__ import annotations

import json
from math import exp, inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.compare import assert_identical
from support.families import needs_running_states
from support.tiny import prompts, tiny_head, tiny_target
from support.trees import candidates_of, paths, random_draft
from support.users import Clock

from hf_dart import DartHead, TreeConfig
from hf_dart.bench import exact
from hf_dart.bench.pair import Pair
from hf_dart.bench.profiling import measure
from hf_dart.cli import main
from hf_dart.decoding import stats
from hf_dart.decoding.pace import Pace
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET
from hf_dart.models.running_states.mixers import mixers_of
from hf_dart.trees.costs import RoundCost, interpolated
from hf_dart.trees.on_host import grow_on_host

POINTS = ((1.0, 1.0), (4.0, 1.3), (8.0, 1.3), (16.0, 2.1))


def measured(draft: float, points: Any, batch: int, most: int = 64) -> RoundCost:
    """Costs of rounds by costs of forwards."""
    return TreeConfig(verify_costs=points, draft_cost=draft).round_cost(batch, "cpu", most=most)


def test_straight_lines_between_points() -> None:
    sizes, costs = zip(*POINTS, (2.5, 1.15), (6.0, 1.3), (12.0, 1.7), (24.0, 2.9), strict=True)
    assert interpolated(POINTS, sizes).tolist() == pytest.approx(costs)


@pytest.mark.parametrize("batch", [1, 2, 3, 40])
def test_a_batch_shares_its_forwards(batch: int) -> None:
    cost = measured(0.4, POINTS, batch)
    assert cost.of(1) == pytest.approx(1.4)
    for nodes in (2, 3, 5, 9, 30):
        assert cost.of(nodes) == pytest.approx(0.4 + interpolated(POINTS, batch * nodes) / interpolated(POINTS, batch))


@pytest.mark.parametrize(
    "points", [[(1, 1)], [(2, 1), (3, 2)], [(1, 1), (1, 2)], [(1, 1), (2, 0.9)], [(1, 1), (2,)], 7, [(1, 1), (2, "x")]]
)
def test_what_is_no_cost(points: Any) -> None:
    with pytest.raises(ValueError, match=r"verify_costs is .*; give two or more pairs of tokens and cost"):
        TreeConfig(verify_costs=points)


def test_the_size_is_that_of_most_tokens_per_cost() -> None:
    """Found here by trying every size; costs rise in stairs, so that the rate has several peaks."""
    random = Random(0)
    sizes = set()
    for seed in range(25):
        candidates = candidates_of(*random_draft(2, 3, 4, seed)).on_host()
        costs = [1.0]
        for _ in range(4):
            costs.append(costs[-1] + random.choice([0.0, 0.1, 0.6]))
        cost = measured(random.choice([0.0, 0.5]), tuple(zip((1, 4, 10, 20, 48), costs, strict=True)), 2)
        if seed % 2:  # and steps may fall
            cost.verify[random.randrange(2, 9) :] -= 0.4
        rates = []
        for nodes in range(1, 24):
            tree = grow_on_host(candidates, nodes=nodes)
            assert tree.scores is not None
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
    pace = Pace(config, "cpu", 1, 4)
    modes = []
    for number in range(60):
        modes.append(pace.choose([([], -inf)], [1.0], [4]))
        came = [[7] * (1 + number % 2)]  # more than a chain costs, which is not looked at again
        pace.count(modes[-1], came, [50], 5, 0, {})
    assert set(modes) == {"tree", "chain"}


def test_where_a_node_is_known_to_cost_it_is_charged_on_any_device() -> None:
    dear = TreeConfig(draft_cost=0.1, verify_costs=((1, 1), (64, 9.0)))
    for config, drafting in ((TreeConfig(draft_cost=0.1), True), (dear, False)):
        pace = Pace(config, "cuda", 2, 4)
        for _ in range(8):
            mode = pace.choose([([], -inf)] * 2, [0.5, 0.5], [4, 4])
            pace.count(mode, [[7, 7], [7, 7]], [50, 50], 32, 0, {})
        assert (mode == "tree") == drafting


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sampled"])
def test_costs_change_no_token(tmp_path: Path, options: dict[str, Any]) -> None:
    """They are kept with the head, and equal calls make equal rounds."""
    target = tiny_target("llama")
    tree = {"verify_costs": [[1, 1], [8, 1.01], [64, 1.5]], "draft_cost": 0.0}
    tiny_head(target, tree=tree).save_pretrained(tmp_path)
    head = DartHead.from_pretrained(str(tmp_path), target=target)
    assert head.tree_config.verify_costs == ((1, 1), (8, 1.01), (64, 1.5))
    committed = []
    for _ in range(2):
        assert_identical(target, head, prompts([9, 3]), **options, max_new_tokens=20)
        assert head.last_stats is not None
        committed.append((head.last_stats.committed, head.last_stats.drafted))
    assert committed[0] == committed[1]
    assert committed[0][1] > 0


def test_measured_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a pass over the target, and one over the head, puts forward by a second."""
    target = tiny_target("llama")
    head = tiny_head(target)
    passes = Clock()
    for part in (target, head.layers[0]):
        part.register_forward_hook(lambda *_: passes.time() and None)
    for timing in (exact, stats):
        monkeypatch.setattr(timing, "perf_counter", lambda: passes.now)
    state = torch.get_rng_state()
    profile = measure(Pair(target, head, None, "target", "head"), context=6, rounds=2, repeats=1, sizes=(1, 4))
    assert torch.equal(torch.get_rng_state(), state)
    config = TreeConfig(**profile.settings)
    assert [size for size, _ in config.verify_costs] == [1, 4]
    assert config.draft_cost == profile.draft == 1
    assert config.verify_costs == ((1, 1), (4, 1))
    assert profile.token_ms == profile.plain_ms == 1000


@needs_running_states
@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("falcon_h1", marks=pytest.mark.matrix)])
def test_levels_are_measured_where_states_run_by_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that every step of a mixer puts forward by a second: one for a tree at once, one per level elsewhere.

    Trees of the last rounds have fewer levels.
    """
    target = tiny_target(family, dtype=torch.float32)
    passes, mixers = Clock(), mixers_of(target)
    projection = next(part for name, part in mixers[0].module.named_modules() if name.startswith("in_proj"))
    projection.register_forward_hook(lambda *_: passes.time() and None)
    for timing in (exact, stats):
        monkeypatch.setattr(timing, "perf_counter", lambda: passes.now)
    pair = Pair(target, tiny_head(target), None, "target", "head")
    found = measure(pair, context=6, rounds=8, repeats=1, sizes=(1, 4))
    assert found.level is None if family == "qwen3_5" else 0.7 < found.level <= 1


@pytest.mark.matrix
def test_profile_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", "--target", str(PACKAGED_TARGET), "--dtype", "float32"]
    assert main([*words, "--save", "--head", "someone/head"]) == 2
    for file in PACKAGED_HEAD.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    report = tmp_path / "costs.json"
    assert main([*words, "--save", "--head", str(tmp_path), "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert f"a draft: {found['draft_cost']:.2f}" in capsys.readouterr().out
    tree = json.loads((tmp_path / "config.json").read_text())["tree"]
    assert (tree["verify_costs"], tree["draft_cost"]) == (found["verify_costs"], found["draft_cost"])
    kept = json.loads((PACKAGED_HEAD / "config.json").read_text())["tree"]
    assert kept.items() <= tree.items(), "what else the head asks for stays"
