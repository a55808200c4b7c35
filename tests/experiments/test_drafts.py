"""`examples/experiments/drafts.py`: ways to score and size trees, side by side in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.scripts import experiment

from hf_dart import NgramTable
from hf_dart.cli import main
from hf_dart.hub.loading import PACKAGED_HEAD

DRAFTS = experiment("drafts")


@pytest.mark.matrix
def test_drafts_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, report = str(tmp_path / "table"), tmp_path / "report.json"
    assert main(["ngram", "build", path, "--text", __file__]) == 0
    words = ["--ngram", path, "--nodes", "6", "--prompts", "1", "--prompt-tokens", "12", "--new-tokens", "6"]
    words += ["--others", str(PACKAGED_HEAD), "--json", str(report)]
    assert DRAFTS.main(words) == 0
    shown = capsys.readouterr().out
    names = ("chain", "marginal tree", "+ n-gram (paper)", "+ n-gram (survival)", "+ selector + n-gram (survival)")
    for name in (*names, "+ selector + n-gram (survival) + copies, size by cost", "the head's own", "head: + selector"):
        assert f"| {name} | " in shown
    assert "| yes |" in shown
    assert "| no |" not in shown
    content = json.loads(report.read_text())
    assert content["drafts"]["chain"]["bytes"] == 0
    assert content["drafts"]["+ n-gram (paper)"]["bytes"] == NgramTable.load(path).nbytes
    assert {one["method"] for one in content["results"]} == {"stock", *content["drafts"]}
    assert {one["mode"] for one in content["results"]} == {"greedy", "sampled, T=1"}
