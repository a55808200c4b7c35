"""What `hf-dart profile` measures: costs by a clock of the test, and the command that keeps them with a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import needs_running_states
from support.tiny import tiny_head, tiny_target
from support.users import Clock

from hf_dart import TreeConfig
from hf_dart.bench import exact
from hf_dart.bench.pair import Pair
from hf_dart.bench.profiling import measure
from hf_dart.cli import main
from hf_dart.decoding import stats
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET
from hf_dart.models.running_states.mixers import mixers_of


def test_measured_on_request(monkeypatch: pytest.MonkeyPatch, noted: Any) -> None:
    """By a clock that a pass over the target, one over the head, and a call puts forward by a second."""
    target = tiny_target("llama")
    head = tiny_head(target)
    passes = Clock()
    for part in (target, head.layers[0]):
        part.register_forward_hook(lambda *_: passes.time() and None)
    noted(type(target), "generate", lambda *_, **__: passes.time())
    for timing in (exact, stats):
        monkeypatch.setattr(timing, "perf_counter", lambda: passes.now)
    state = torch.get_rng_state()
    profile = measure(Pair(target, head, None, "target", "head"), context=6, rounds=2, repeats=1, sizes=(1, 4))
    assert torch.equal(torch.get_rng_state(), state)
    config = TreeConfig(**profile.tree)
    assert [size for size, _ in config.verify_costs] == [1, 4]
    assert config.draft_cost == 1
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
    found = measure(pair, context=6, rounds=16, repeats=1, sizes=(1, 4))
    assert "level_cost" not in found.tree if family == "qwen3_5" else 0.7 < found.tree["level_cost"] <= 1


@pytest.mark.matrix
def test_profile_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", "--target", str(PACKAGED_TARGET), "--dtype", "float32"]
    assert main([*words, "--save", "--head", "someone/head"]) == 2
    for file in PACKAGED_HEAD.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert main([*words, "--save", "--head", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.partition("tree=")[2])
    tree = json.loads((tmp_path / "config.json").read_text())["tree"]
    assert (tree["verify_costs"], tree["draft_cost"]) == (found["verify_costs"], found["draft_cost"])
    kept = json.loads((PACKAGED_HEAD / "config.json").read_text())["tree"]
    assert kept.items() <= tree.items(), "what else the head asks for stays"
