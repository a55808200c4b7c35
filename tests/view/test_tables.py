"""Tables of measurements, in Markdown and on a terminal."""

from __future__ import annotations

import sys

import pytest

from hf_dart.cli import main
from hf_dart.view.tables import aligned, markdown


def test_columns_are_aligned() -> None:
    text = "\n".join(["Some `words` here.", "", *markdown(["name", "ms"], [["a b", "1.50"], ["**c**", "12.25"]])])
    assert aligned(text).splitlines() == ["Some words here.", "", "name  ms", "---   ---", "a b   1.50", "c     12.25"]


def test_bench_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two prompts are enough; tables are aligned, and a bar says how long it will take."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    words = ["--prompts", "2", "--new-tokens", "4", "--repeats", "1", "--modes", "greedy", "--rivals", "tree"]
    assert main(["bench", *words]) == 0
    shown, told = capsys.readouterr()
    assert "hf_dart" in shown
    assert "|" not in shown
    # Stock and ours on either prompt, and once to warm up.
    assert "/6 [" in told
    assert "call/s" in told
    assert main(["bench", *words, "--batch", "4"]) == 2
    assert "--batch takes sizes from 1 to the number of prompts, 2." in capsys.readouterr().err
