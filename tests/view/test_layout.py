"""Tables on a terminal of 80 columns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.scripts import experiment

from hf_dart.cli import main
from hf_dart.view.layout import laid_out
from hf_dart.view.tables import as_table, markdown

CARDS = Path(__file__).parents[2] / "model_cards"


def test_cells_are_aligned_and_sentences_broken() -> None:
    text = "\n".join(["Some `words` here.", *markdown(["name", "ms"], [["a b", "1.50"], ["**c**", "12.25"]])])
    assert laid_out(text, 12).splitlines() == [
        "Some words",
        "here.",
        "name     ms",
        "----  -----",
        "a b    1.50",
        "c     12.25",
    ]


def test_wide_cells_are_broken_between_words() -> None:
    text = "\n".join(markdown(["method", "ms"], [["copies of text", "1"], ["", "2"]]))
    assert laid_out(text, 11).splitlines() == ["method   ms", "-------  --", "copies    1", "of text", "          2"]


def test_a_column_that_does_not_fit_becomes_headings() -> None:
    rows = [["one", "aaaa", "1"], ["one", "bbbb", "2"], ["two", "aaaa", "3"]]
    found = laid_out("\n".join(markdown(["case", "name", "ms"], rows)), 11).splitlines()
    head = ["name  ms", "----  --"]
    assert found == ["case one:", *head, "aaaa   1", "bbbb   2", "case two:", *head, "aaaa   3"]


@pytest.mark.parametrize("file", ["demo_pair/bench.json", "rivals/rivals.json", "drafts/drafts.json"])
def test_all_that_was_measured_fits(file: str) -> None:
    report: dict[str, Any] = json.loads((CARDS / file).read_text(encoding="utf8"))
    texts = [experiment("render").table(CARDS / file)]
    if "drafts" not in report:
        several = [{**one, "text": text} for text in ("code", "summarisation") for one in report["results"]]
        texts.append(as_table({**report, "results": several}))
    for text in texts:
        shown = laid_out(text, 80)
        assert max(map(len, shown.splitlines())) <= 80
        words = text.replace("**", "").replace("`", "").replace("|", " ").split()
        assert {word for word in words if not word.startswith("---")} <= set(shown.replace(":", " :").split()) | {
            word for word in words if ":" in word
        }


def test_bench_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two prompts are enough; tables are laid out, and a bar says how long it will take."""
    monkeypatch.setenv("COLUMNS", "80")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    words = ["--prompts", "2", "--new-tokens", "4", "--repeats", "1", "--modes", "greedy", "--rivals", "tree"]
    assert main(["bench", *words]) == 0
    shown, told = capsys.readouterr()
    assert "hf_dart" in shown
    assert "|" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    # Stock and ours on either prompt, and once to warm up.
    assert "/6 [" in told
    assert "call/s" in told
    assert main(["bench", *words, "--batch", "4"]) == 2
    assert "--batch takes sizes from 1 to the number of prompts, 2." in capsys.readouterr().err
