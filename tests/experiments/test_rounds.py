"""`examples/experiments/rounds.py`: every method runs, the head reaches its τ, and all write the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.engines import SIMULATED
from support.scripts import experiment
from support.simulated_gpu import needs_a_driver

ROUNDS = experiment("rounds")
_TINY = "--shape tiny --dtype float32 --backend none --tau 3.5 --nodes 1,8 --draft-length 4 --batch 2"
WORDS = [*_TINY.split(), "--prompt-tokens", "12", "--new-tokens", "30", "--repeats", "2"]
METHODS = [("stock", None), *((name, nodes) for nodes in (1, 8) for name in (ROUNDS.CALLED, ROUNDS.COMPILED))]


@pytest.mark.parametrize("sampled", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_all_methods(
    sampled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All write the same, in as many rounds; what was known after each was written whole."""
    file, lines, write = tmp_path / "rounds.json", list[int](), ROUNDS.write_json

    def watched(*args: object) -> None:
        write(*args)
        lines.append(len(json.loads(file.read_text())["markdown"].splitlines()))

    monkeypatch.setattr(ROUNDS, "write_json", watched)
    words = [*WORDS, "--device", "cpu", "--json", str(file), *(["--sample"] if sampled else [])]
    assert ROUNDS.main(words) == 0
    report = json.loads(file.read_text())
    results = {(one["name"], one["nodes"]): one for one in report["results"]}
    assert list(results) == METHODS
    assert lines[0] < lines[4] == lines[-1]
    assert all(one["same"] and one["tokens_per_second"] > 0 and one["of_memory_speed"] > 0 for one in results.values())
    called, compiled = results[ROUNDS.CALLED, 8], results[ROUNDS.COMPILED, 8]
    assert called["tau"] == compiled["tau"] == pytest.approx(3.5, abs=0.5)
    assert called["rounds"] == compiled["rounds"]
    assert results[ROUNDS.COMPILED, 1]["tau"] == 1
    assert set(called["phase_ms"]) == {"noise", "draft", "grow", "verify", "walk", "commit"}
    out = capsys.readouterr()
    assert report["markdown"] in out.out
    assert "preparing forwards of 8 nodes for 2 row(s)" in out.err


@needs_a_driver
@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """Where launches are counted."""
    file = tmp_path / "rounds.json"
    assert ROUNDS.main([*WORDS, "--device", "cuda", "--json", str(file)]) == 0
    results = {(one["name"], one["nodes"]): one for one in json.loads(file.read_text())["results"]}
    assert results[ROUNDS.COMPILED, 8]["launches"] < results[ROUNDS.CALLED, 8]["launches"]


def test_what_a_forward_reads() -> None:
    target = SIMULATED.build_target("tiny", torch.float32, torch.device("cpu"))
    hidden, vocabulary, layer = 64, 512, 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64 + 2 * 16
    weights = vocabulary * hidden + 2 * layer + hidden
    assert SIMULATED.forward_bytes(target, batch=3, context=10) == 4 * (weights + 3 * 10 * 2 * 2 * 2 * 16)
    assert ROUNDS.memory_speed(torch.device("cpu")) > 1e8
