"""`examples/experiments/rounds.py` on a CPU: every method runs, the head reaches its τ, and all write the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.engines import SIMULATED, counting
from support.scripts import experiment
from support.simulated_gpu import SimulatedGpu
from torch._dynamo.utils import counters

import hf_dart

ROUNDS = experiment("rounds")
CAPTURED, EAGER, FORWARD, NUCLEUS = ROUNDS.CAPTURED, ROUNDS.EAGER, ROUNDS.FORWARD, ROUNDS.NUCLEUS
PLAIN, SAMPLED, STATIC, STOCK = ROUNDS.PLAIN, ROUNDS.SAMPLED, ROUNDS.STATIC, ROUNDS.STOCK
_TINY = ["--shape", "tiny", "--dtype", "float32", "--device", "cpu", "--backend", "none"]
_TINY += ["--repeats", "1", "--draft-length", "4"]


WORDS = "--tau 3.5 --nodes 8 --batch 2 --prompt-tokens 12 --new-tokens 30"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many lines each report had that was written."""
    lines: list[int] = []
    write = ROUNDS.write_json
    monkeypatch.setattr(
        ROUNDS, "write_json", lambda file, report: (lines.append(len(report.get("results", ()))), write(file, report))
    )
    return lines


def test_switches(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields of `EngineConfig` by name: they are those of the engine, and are told in table and JSON."""
    monkeypatch.setattr(ROUNDS, "_SIZES", {"cpu": (1, 4)})
    file, words = tmp_path / "engine.json", "--nodes 8 --tau 2 --prompt-tokens 12 --new-tokens 8"
    switches = ["--engine", "share=1", "first_tier=64"]
    assert ROUNDS.main([*_TINY, *words.split(), *switches, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    wanted = {"share": 1, "first_tier": 64}
    assert report["settings"]["engine"] == wanted
    assert {name: report["engine"][name] for name in wanted} == wanted
    assert "share 1, first_tier 64, backend None" in capsys.readouterr().out


def test_all_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ROUNDS, "_SIZES", {"cpu": (1, 4)})
    file = tmp_path / "engine.json"
    assert ROUNDS.main([*_TINY, *WORDS.split(), "--every-method", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    results = {one["method"]: one for one in report["results"]}
    assert list(results) == [STOCK, CAPTURED, EAGER, STATIC, PLAIN, SAMPLED, NUCLEUS, FORWARD]
    assert all(one["same_tokens"] for one in results.values())
    assert all(one["tokens_per_second"] > 0 and one["roofline"] > 0 for one in results.values())
    for method in (EAGER, FORWARD, CAPTURED, SAMPLED, NUCLEUS):
        assert results[method]["tau"] == pytest.approx(3.5, abs=0.5)
    assert results[CAPTURED]["rounds"] == results[EAGER]["rounds"]
    assert results[PLAIN]["tau"] == 1
    phases = report["phase_ms"]
    assert set(phases) == {"draft + grow", "verify + walk", "commit", "round"}
    assert min(phases.values()) > 0
    assert report["kernels"] == []
    assert report["bandwidth_bytes_per_second"] > 1e8
    assert {name: list(costs["verify"]) for name, costs in report["costs"].items()} == {
        "tiny": ["1", "4"],
        "packaged pair": ["1", "4"],
    }
    assert all(2 <= nodes <= 64 for costs in report["costs"].values() for nodes in costs["nodes_worth"].values())
    out = capsys.readouterr()
    assert f"| {CAPTURED} | {results[CAPTURED]['tau']:.2f} |" in out.out
    assert "\n".join(ROUNDS.costs_table(report["costs"])) in out.out
    assert "preparing forwards of 8 nodes for 2 row(s)" in out.err
    assert "preparing rounds of 16 nodes in all for 2 row(s)" in out.err
    assert [kept.count(lines) > 0 for lines in range(9)] == [True] * 9, "whole after every line"


@pytest.mark.gpu
@pytest.mark.matrix
def test_on_a_gpu(tmp_path: Path, gpu: SimulatedGpu | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where launches are counted, and graphs go on with another τ."""
    if gpu is not None:  # transformers compiles its forward over a static cache for a GPU
        all_of_them = ROUNDS._methods
        few = (STOCK, CAPTURED, EAGER, f"{CAPTURED}, τ = 3")
        monkeypatch.setattr(ROUNDS, "_methods", lambda *of: [one for one in all_of_them(*of) if one.method in few])
        monkeypatch.setattr(ROUNDS, "_COPIED", {"cuda": 2**20})
        monkeypatch.setattr(ROUNDS, "_SIZES", {"cuda": (1, 4)})
    file = tmp_path / "engine.json"
    words = [*_TINY, *WORDS.split(), "--device", "cuda", "--json", str(file)]
    assert ROUNDS.main(words) == 0
    report = json.loads(file.read_text())
    results = {one["method"]: one for one in report["results"]}
    other = results[f"{CAPTURED}, τ = 3"]
    assert other["tau"] == pytest.approx(3, abs=0.5)
    assert other["tau"] < results[CAPTURED]["tau"]
    assert all(one["same_tokens"] for one in report["results"])
    assert all(one["launches_per_round"] is not None for one in report["results"])
    if gpu is None:
        assert results[CAPTURED]["launches_per_round"] < 10 < results[EAGER]["launches_per_round"]
        assert report["kernels"][0]["ms"] > 0


def test_no_time_left(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is no time for is left out, and said so; what was measured is there."""
    monkeypatch.setattr(ROUNDS, "_Left", _Never)
    file = tmp_path / "engine.json"
    assert ROUNDS.main([*_TINY, *WORDS.split(), "--repeats", "2", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["results"] == []
    assert report["left_out"] == [STOCK, CAPTURED, EAGER]
    assert f"since the 240 s were over: {STOCK}, {CAPTURED}, {EAGER}." in capsys.readouterr().out


class _Never:
    def __init__(self, seconds: float) -> None:
        assert seconds == 240

    def allows(self, seconds: float) -> bool:
        return False


def test_tau_changes_in_place() -> None:
    """Rounds that were captured go on with it, and nothing is made again; idle rounds do not lower it."""
    target, head, inputs = counting(5.0)
    made = hf_dart.compile(target, head, backend=None, lag=1)
    place, tiers, taus = head.get_buffer("_right").data_ptr(), [], []
    for tau in (5.0, 2.0):
        head.aim(tau)
        target.generate(**inputs, assistant=head, do_sample=False, max_new_tokens=40)
        taus.append(head.last_stats.tau)
        tiers.append(made.tiers)
    assert head.get_buffer("_right").data_ptr() == place
    assert tiers[0] == tiers[1]
    assert taus[0] > 2 * taus[1] > 3


@pytest.mark.matrix
def test_parts_are_not_compiled_again() -> None:
    torch._dynamo.reset()
    counters.clear()
    target, head, inputs = counting(4.0)
    made = hf_dart.compile(target, head, backend="eager", first_tier=64)
    target.generate(**inputs, assistant=head, do_sample=False, max_new_tokens=8)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 3
    (tier,) = made.tiers
    assert tier is not None
    assert set(ROUNDS.phase_ms(tier)) == {"draft + grow", "verify + walk", "commit", "round"}
    assert counters["stats"]["unique_graphs"] == graphs


def test_what_a_forward_reads() -> None:
    target = SIMULATED.build_target("tiny", torch.float32, torch.device("cpu"))
    hidden, vocabulary, layer = 64, 512, 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64 + 2 * 16
    weights = vocabulary * hidden + 2 * layer + hidden
    assert SIMULATED.forward_bytes(target, batch=3, context=10) == 4 * (weights + 3 * 10 * 2 * 2 * 2 * 16)
    assert ROUNDS.memory_bandwidth(torch.device("cpu")) > 1e8


def test_the_page_is_of_its_json() -> None:
    folder = Path(__file__).parents[2] / "model_cards" / "engine"
    costs = json.loads((folder / "qwen3-0.6b_cpu.json").read_text())["costs"]
    table = (folder / "README.md").read_text().split("<!-- costs -->\n")[1].split("\n<!-- /costs -->")[0]
    assert table.splitlines() == ROUNDS.costs_table(costs)
