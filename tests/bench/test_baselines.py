"""Every rival in one run of `hf-dart bench`, on suites of prompts; plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_dart import DartHead, EagleDrafter
from hf_dart.bench.baselines import ASSISTED, COMPILED, LOOKUP, STOCK
from hf_dart.cli import main
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET, load_target
from hf_dart.view.tables import OURS, as_table, labels


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("baselines")
    model, tokenizer = load_target()
    story = folder / "story.jsonl"
    story.write_text('{"prompt": "import os"}\n{"prompt": "class Story:"}\n', encoding="utf8")
    small = {"draft_length": 3, "intermediate_size": 64}
    EagleDrafter.from_target(model, tokenizer=tokenizer, **small).save_pretrained(folder / "eagle")
    DartHead.from_target(model, tokenizer=tokenizer, **small).save_pretrained(folder / "mine")
    words = ["--suite", "code", str(story), "--rivals", "lookup,chain,tree,copies", "--modes", "greedy,sampled"]
    words += ["--assistant-model", str(PACKAGED_TARGET), "--drafter", str(folder / "eagle")]
    words += ["--drafter", str(folder / "mine"), "--repeats", "1", "--batch", "1", "--new-tokens", "4"]
    words += ["--json", str(folder / "bench.json")]
    assert main(["bench", "--smoke", *words]) == 0
    return json.loads((folder / "bench.json").read_text(encoding="utf8"))


def test_every_rival_takes_part(report: dict[str, Any]) -> None:
    ours = {OURS, f"{OURS}, chain", f"{OURS}, copies alone", f"{OURS}, eagle", f"{OURS}, mine"}
    for text in ("code", "story.jsonl"):
        for mode in ("greedy", "sampled, T=1"):
            stocks = {STOCK, ASSISTED, *([LOOKUP] if mode == "greedy" else [])}
            case = {"text": text, "mode": mode}
            found = [one for one in report["results"] if case.items() <= one.items()]
            assert {one["method"] for one in found} == stocks | ours
    for one in report["results"]:
        assert one["ours"] == (one["method"] in ours)
        if one["ours"]:
            assert one["identical"]
            assert one["compared"]["rows"] == 2
        if one["method"] == ASSISTED:
            assert ("compared" in one) == (one["mode"] == "greedy")
    assert set(report["drafters"]) == {ASSISTED, OURS, f"{OURS}, chain", f"{OURS}, eagle", f"{OURS}, mine"}
    assert report["text"] == "code, story.jsonl"
    assert report["settings"]["prompt_tokens"] == max(one["prompt_tokens"] for one in report["results"])


def test_tables_say_which_case(report: dict[str, Any]) -> None:
    assert set(labels(report)) == {"code", "story.jsonl"}
    table = as_table(report)
    assert "| case | batch | mode | method |" in table
    assert "| code | 1 | greedy | hf_dart, eagle |" in table
    assert "other numbers" in table
    alone = {**report, "results": [one for one in report["results"] if one["text"] == "code"]}
    assert set(labels(alone)) == {""}


def test_options_that_name_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--rivals", "eagles"], "'eagles' is none of compiled"),
        (["--modes", "beam"], "'beam' is none of greedy"),
    ):
        with pytest.raises(SystemExit):
            main(["bench", *words])
        assert message in capsys.readouterr().err
    assert main(["bench", "--smoke", "--suite", "no/such/file.jsonl"]) == 2
    assert "Cannot read the suite" in capsys.readouterr().err
    assert main(["bench", "--smoke", "--assistant-model", str(PACKAGED_HEAD)]) == 2
    assert "Cannot load the assistant model" in capsys.readouterr().err


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
