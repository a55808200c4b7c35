"""`hf-dart bench`: every method in one run, whose figures have to hang together, and its tables."""

from __future__ import annotations

import json
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from support.sentences import assert_command_says
from torch import Tensor
from transformers import StoppingCriteria

from hf_dart import DartHead, EagleDrafter, LookupDrafter
from hf_dart.bench import speed
from hf_dart.bench.baselines import ASSISTED, COMPILED, LOOKUP, STOCK
from hf_dart.bench.pair import load_pair
from hf_dart.cli import main
from hf_dart.hub.loading import PACKAGED_TARGET, load_target
from hf_dart.hub.tables import OURS, as_table, by_category, labels

DRAFTERS = {OURS, f"{OURS}, chain", f"{OURS}, copies alone", f"{OURS}, eagle", f"{OURS}, mine"}
MODES = ("greedy", "sampled, T=1")
GREEDY = speed.MODES["greedy"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bench")
    model, tokenizer = load_target()
    story = folder / "story.jsonl"
    story.write_text('{"turns": ["import os", "class Story:"], "category": "two"}\n{\n', encoding="utf8")
    small = {"draft_length": 3, "intermediate_size": 64}
    EagleDrafter.from_target(model, tokenizer=tokenizer, **small).save_pretrained(folder / "eagle")
    DartHead.from_target(model, tokenizer=tokenizer, **small).save_pretrained(folder / "mine")
    words = ["--suite", "code", f"spec-bench={story}", "--rivals", "lookup,chain,tree,copies"]
    words += ["--modes", "greedy,sampled", "--no-thinking", "--new-tokens", "4"]
    words += ["--assistant-model", str(PACKAGED_TARGET), "--drafter", str(folder / "eagle")]
    words += ["--drafter", str(folder / "mine"), "--json", str(folder / "bench.json")]
    assert main(["bench", "--smoke", *words]) == 0
    return json.loads((folder / "bench.json").read_text(encoding="utf8"))


def test_every_method_takes_part(report: dict[str, Any]) -> None:
    for text in ("code", "spec-bench: two"):
        for mode in MODES:
            for batch in (1, 2):
                alone = {ASSISTED, *([LOOKUP] if mode == "greedy" else [])} if batch == 1 else set()
                case = {"text": text, "mode": mode, "batch": batch}
                found = [one["method"] for one in report["results"] if case.items() <= one.items()]
                assert len(found) == len(set(found))
                assert set(found) == {STOCK} | alone | DRAFTERS
    for one in report["results"]:
        assert one["ours"] == (one["method"] in DRAFTERS)
        if one["ours"]:
            assert one["identical"]
            assert one["compared"]["rows"] == 2 * 2  # prompts x repeats
        if one["method"] == ASSISTED:
            assert ("compared" in one) == (one["mode"] == "greedy")
    assert set(report["drafters"]) == {ASSISTED, *DRAFTERS} - {f"{OURS}, copies alone"}
    assert report["text"] == "code, spec-bench: two"
    assert report["settings"]["prompt_tokens"] == max(one["prompt_tokens"] for one in report["results"])
    assert (report["chat_template"], report["template_flags"]) == (None, {"enable_thinking": False})
    assert (report["dtype"], report["threads"]) == ("float32", torch.get_num_threads())
    assert report["clock"] == ("processor time" if torch.get_num_threads() == 1 else "wall time")
    assert report["command"].startswith("hf-dart bench --smoke")
    assert set(report["versions"]) == {"python", "hf-dart", "torch", "transformers"}


def test_figures_hang_together(report: dict[str, Any]) -> None:
    stocks = {(one["text"], one["batch"], one["mode"]): one for one in report["results"] if one["method"] == STOCK}
    for one in report["results"]:
        stock = stocks[one["text"], one["batch"], one["mode"]]
        assert len(one["seconds"]) == 2
        speeds = one["tokens_per_second"]
        assert speeds["min"] <= speeds["median"] <= speeds["max"]
        assert speeds["max"] == pytest.approx(one["tokens"] / min(one["seconds"]))
        assert 0 <= one["repeated_4grams"] < 1
        ratios = [
            stock_s / s * one["tokens"] / stock["tokens"]
            for stock_s, s in zip(stock["seconds"], one["seconds"], strict=True)
        ]
        assert one["ratio"]["min"] == pytest.approx(min(ratios))
        assert one["ratio"]["max"] == pytest.approx(max(ratios))
        if one["ours"] and not one["compared"]["near_ties"]:
            assert one["tokens"] == stock["tokens"]
        if one["method"] == OURS:
            # Every token but each row's first, which the prefill gives, was committed by a round.
            assert one["tau"] == pytest.approx(1 + sum(one["accepted_per_depth"]) / one["row_rounds"])
            assert 0 <= one["acceptance_rate"] < 1
            assert set(one["round_ms"]) == {"noise", "draft", "grow", "verify", "walk", "commit", "rest"}
            whole = sum(one["round_ms"].values()) * one["rounds"] / 1000 + one["prefill_seconds"]
            assert whole == pytest.approx(sum(one["seconds"]))
            forward = one["round_ms"]["draft"] + one["round_ms"]["verify"]
            assert one["not_forward"] == pytest.approx(1 - forward / sum(one["round_ms"].values()))
    assert all("tau" not in one for one in stocks.values())
    assert any(one.get("tau", 0) > 1 for one in report["results"])


@pytest.mark.parametrize("threads", [1, 2])
def test_only_work_is_counted_on_one_thread(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(StoppingCriteria):
        def __call__(self, ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
            sleep(0.15)
            return torch.zeros(len(ids), dtype=torch.bool)

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    settings = speed.Settings(1, new_tokens=2, repeats=1)
    mode = {"greedy": {"do_sample": False, "stopping_criteria": [Waiting()]}}
    for one in speed.measure(load_pair(), [[1, 2, 3]], settings, {OURS: {"assistant": LookupDrafter()}}, mode):
        assert (sum(one.seconds) > 0.3) == (threads == 2)


def test_repeats_draft_from_nothing_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the memory of "auto" either, where no drafter is known."""
    monkeypatch.setattr("hf_dart.decoding.load_drafter.published_drafters", lambda config: ("", []))
    pair = load_pair(str(PACKAGED_TARGET), "auto")
    settings = speed.Settings(1, new_tokens=8, repeats=2)
    (_, ours) = speed.measure(pair, [[1, 2, 3] * 4], settings, {OURS: {"assistant": pair.head}}, {"greedy": GREEDY})
    assert ours.stats.rounds
    assert pair.model.generate.memory.store.tokens == 0


def test_a_smoke_bench_of_one_prompt() -> None:
    assert main(["bench", "--smoke", "--prompts", "1", "--modes", "greedy", "--rivals", "tree"]) == 0


def test_tables_of_one_bench_and_of_two(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(labels(report)) == {"code", "spec-bench: two"}
    table = as_table(report)
    assert all(part in table for part in ("| case | batch | mode |", "| code | 1 | greedy | hf_dart, eagle |"))
    assert "other numbers" in table
    assert set(labels({"results": [one for one in report["results"] if one["text"] == "code"]})) == {""}
    found = {(one["text"], one["batch"], one["mode"], one["method"]): one for one in report["results"]}
    key = ("spec-bench: two", 1, "greedy")
    ours, lookup, copies = (found[*key, method] for method in (OURS, LOOKUP, f"{OURS}, copies alone"))
    rows = [line.split(" | ") for line in by_category(report).splitlines()[2:]]
    assert len(rows) == 2 * 2 * 2
    (row,) = (row for row in rows if row[:3] == ["| spec-bench: two", "1", "greedy"])
    ratio = ours["ratio"]["median"]
    assert row[3] == str(ours["prompts"])
    assert float(row[4]) == pytest.approx(1 + sum(map(float, row[5].split())), abs=0.02 * len(row[5].split()) + 0.01)
    ratios = [ratio, ratio / lookup["ratio"]["median"], ratio / copies["ratio"]["median"]]
    assert [float(cell) for cell in row[6:9]] == pytest.approx(ratios, abs=0.006)

    others = {"settings": {**report["settings"], "repeats": 7}, "chat_template": "0123456789"}
    doubled = [{**one, "ratio": {"median": 2 * one["ratio"]["median"]}} for one in found.values()]
    later = {**report, **others, "template_flags": {"enable_thinking": False}, "results": doubled}
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, content in zip(files, (report, {**later, "results": later["results"][1:]}), strict=True):
        file.write_text(json.dumps(content), encoding="utf8")
    assert main(["bench", "compare", *map(str, files)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("| +100% |") == len(found) - 1
    told = f"repeats {report['settings']['repeats']} → 7, template  → ; chat template 01234567, enable_thinking=False"
    assert f"not measured alike: {told}" in shown
    assert shown.rstrip().endswith("rows that only one of them has: 1")
    files[1].write_text("{}", encoding="utf8")
    assert_command_says(["bench", "--smoke", "compare", *map(str, files)], "Options before compare are", capsys)
    assert_command_says(["bench", "compare", *map(str, files)], "Give two files of hf-dart bench --json", capsys)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of inductor's own imports
def test_what_is_compiled_writes_the_same(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    words = ["--rivals", "compiled,tree,engine", "--batch", "1", "--repeats", "1", "--dtype", "float64"]
    assert main(["bench", "--smoke", *words, "--modes", "greedy,penalty", "--json", str(file)]) == 0
    compiled = [one for one in json.loads(file.read_text())["results"] if one["method"] in COMPILED]
    modes = ("greedy", "greedy, penalty 1.1")
    assert {(one["mode"], one["method"]) for one in compiled} == {(mode, name) for mode in modes for name in COMPILED}
    assert all(one["identical"] for one in compiled)
