"""Measurements of examples/ that a page quotes: each runs on less, and what it prints or writes hangs together."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.scripts import experiment
from support.tiny import tiny_target
from transformers import AutoTokenizer

from hf_dart import NgramTable, SuffixStore
from hf_dart.cli import main
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET
from hf_dart.hub.tables import STOCK

ROOT = Path(__file__).parents[2]
compare = SimpleNamespace(**run_path(str(ROOT / "examples" / "diffusion_drafter" / "compare.py")))


def written(tmp_path: Path, program: Any, *words: str) -> dict[str, Any]:
    """What a program writes with `--json`."""
    file = tmp_path / "found.json"
    assert not program.main([*words, "--json", str(file)])
    return json.loads(file.read_text(encoding="utf8"))


@pytest.mark.parametrize("layers", [3, 5, 7])
def test_a_deeper_target_begins_as_the_same_function(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo_pair"))
    shallow = tiny_target("qwen3")
    deep = import_module("train_target").deepened(shallow, layers).eval()
    ids = torch.randint(0, shallow.config.vocab_size, (2, 9))
    assert len(deep.model.layers) == layers
    assert torch.equal(deep(input_ids=ids).logits, shallow(input_ids=ids).logits)


@pytest.mark.matrix
def test_drafts_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "table")
    assert main(["ngram", "build", path, "--text", __file__]) == 0
    words = ["--ngram", path, "--nodes", "6", "--prompts", "1", "--prompt-tokens", "12", "--new-tokens", "6"]
    content = written(tmp_path, experiment("drafts"), *words, "--others", str(PACKAGED_HEAD))
    shown = capsys.readouterr().out
    names = ("chain", "marginal tree", "+ n-gram (paper)", "+ n-gram (survival)", "+ selector + n-gram (survival)")
    for name in (*names, "+ selector + n-gram (survival) + copies, size by cost", "the head's own", "head: + selector"):
        assert f"| {name} | " in shown
    assert "| yes |" in shown
    assert "| no |" not in shown
    assert content["drafts"]["chain"]["bytes"] == 0
    assert content["drafts"]["+ n-gram (paper)"]["bytes"] == NgramTable.load(path).nbytes
    assert {one["method"] for one in content["results"]} == {"stock", *content["drafts"]}
    assert {one["mode"] for one in content["results"]} == {"greedy", "sampled, T=1"}


def test_more_nodes_choose_more_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experiment("experts")
    tiny = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 256, "moe_intermediate_size": 16}
    for name, (kind, fields) in experts.TARGETS.items():
        monkeypatch.setitem(experts.TARGETS, name, (kind, {**fields, **tiny}))
    found = written(tmp_path, experts, "--new-tokens", "24")["results"]
    sparse = found["8 of 64 experts"]
    assert sparse[experts.STOCK]["experts"] == 8
    assert sparse["2"]["experts"] < sparse["8"]["experts"] < sparse["32"]["experts"] < 64
    assert found["dense"][experts.PACE]["experts"] == 0


def test_every_way_without_a_head_writes_stocks_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headless = experiment("headless")
    monkeypatch.setattr(headless, "KINDS", headless.KINDS[1:2])
    content = written(tmp_path, headless, "--calls", "2", "--new-tokens", "12")
    rows = [line.split(" | ") for line in content["markdown"].splitlines()[2:]]
    assert len(rows) == 5
    assert all(float(tau) >= 1 for *_, tau, _ in rows)
    assert float(rows[3][3]) > 1.3, "the packaged head drafts"


@pytest.mark.parametrize(("program", "report"), [("hybrid_costs", "costs.json"), ("tree_forms", "forms.json")])
def test_the_page_of_hybrid_costs_is_of_its_json(program: str, report: str) -> None:
    made, folder = experiment(program), ROOT / "model_cards" / "hybrid_costs"
    found = json.loads((folder / report).read_text())
    assert list(found.get("targets", [])) == list(getattr(made, "TARGETS", []))
    table = (folder / "README.md").read_text().split(made.MARKERS[0])[1].split(made.MARKERS[1])[0]
    assert table.strip().splitlines() == made.table(found)


def test_forms_of_trees_are_measured() -> None:
    made = experiment("tree_forms")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    made.CONFIG |= {**sizes, "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    found = made.measured(rounds=1)
    assert list(found) == [str(size) for size in (1, *made.SIZES)]
    assert found["1"]["once"]["calls"] == found["1"]["levels"]["calls"]
    assert found["16"]["once"]["calls"] < 0.6 * found["16"]["levels"]["calls"]


def test_every_method_writes_stocks_text_at_every_length(tmp_path: Path) -> None:
    lengths = experiment("lengths")
    assert lengths.sizes("1k,300") == (1024, 300)
    words = ["--lengths", "40,90", "--windows", "36", "--new-tokens", "8", "--prompts", "1", "--repeats", "1"]
    found = {(one["prompt"], one["method"]): one for one in written(tmp_path, lengths, *words)["results"]}
    assert len(found) == 16
    assert all(one["identical"] for one in found.values())
    assert found[90, "head"]["tau"] > 1
    assert found[90, "head, window 36"]["draft_ms"] > 0
    assert found[90, STOCK]["ratio"]["median"] == 1
    assert "tau" not in found[90, STOCK]


def test_a_memory_adds_to_copies(capsys: pytest.CaptureFixture[str]) -> None:
    """And a step accepts what its tree holds."""
    remembered = experiment("remembered")
    calls = list(remembered.tool_calls(AutoTokenizer.from_pretrained(PACKAGED_TARGET), 5))
    alone, remembers = (remembered.replayed(calls, store) for store in (None, SuffixStore()))
    assert remembers.accepted / remembers.steps > 1.5 * alone.accepted / alone.steps
    assert remembers.accepted + remembers.steps >= sum(len(answer) for _, answer in calls)
    remembered.replay({"calls": calls[:2]})
    assert "| calls | 2, " in capsys.readouterr().out


def test_training_is_measured_against_the_bare_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rows", "2", "--length", "48", "--blocks", "2,6", "--repeats", "2"]
    report = written(tmp_path, experiment("training_cost"), *words)
    assert "| x bare target |" in capsys.readouterr().out
    assert report["target_layers"] == 8
    bare, *steps = report["results"]
    assert [one["blocks"] for one in report["results"]] == [0, 2, 6]
    assert bare["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    for one in steps:
        ratios = [target / step for target, step in zip(bare["seconds"], one["seconds"], strict=True)]
        assert one["ratio"]["max"] == pytest.approx(max(ratios))
        assert one["tokens_per_second"]["max"] == pytest.approx(96 / min(one["seconds"]))
        assert one["peak_memory_bytes"] > 2**20


def test_the_card_of_diffusion_drafters_is_of_its_json(tmp_path: Path) -> None:
    file = ROOT / "model_cards" / "diffusion_drafter" / "compare.json"
    report = json.loads(file.read_text(encoding="utf8"))
    card = (file.parent / "README.md").read_text(encoding="utf8")
    assert card.count(compare.tables(report)) == 1
    again = tmp_path / "README.md"
    again.write_text(card.replace("| stock | 1.00 |", "| stock | 9.99 |"), encoding="utf8")
    compare.write_tables(report, again)
    assert again.read_text(encoding="utf8") == card
    for result in report["results"]:
        stock, *others = result["methods"]
        assert (stock["tau"], stock["ratio"]) == ([1.0, 0.0], [1.0, 0.0])
        # The language model's sampled text is another one: stock's loop draws otherwise.
        others = [one for one in others if "sampled" not in result["mode"] or "language" not in one["method"]]
        assert all(one["same"] == 1 for one in others)


def test_figures_of_diffusion_drafters() -> None:
    """Two prompts, two repeats; a prefill's token is not a round's, and stock's assisted loop has no prefill."""

    def calls(seconds: float, tokens: int, rounds: int) -> list[object]:
        return [compare.Call(seconds, seconds / 2, tokens, rounds, True) for _ in range(4)]

    stock = compare.Method("stock", calls=calls(1.0, 9, 8))
    ours = compare.Method("ours", calls=calls(0.5, 9, 4))
    theirs = compare.Method("theirs", prefills=False, calls=calls(2.0, 9, 3))
    rows = [compare.figures(one, stock, 2) for one in (stock, ours, theirs)]
    assert [row["tau"] for row in rows] == [(1.0, 0.0), (2.0, 0.0), (3.0, 0.0)]
    assert [row["ratio"] for row in rows] == [(1.0, 0.0), (2.0, 0.0), (0.5, 0.0)]
    assert (rows[1]["draft_ms"], rows[1]["round_ms"]) == (62.5, 125.0)
    assert (rows[2]["draft_ms"], rows[2]["same"]) == (pytest.approx(1000 / 3), 1.0)
