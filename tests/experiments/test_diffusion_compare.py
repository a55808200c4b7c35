"""The card of the diffusion drafters: its tables are those of its JSON, and the figures in them are what they say."""

from __future__ import annotations

import json
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
compare = SimpleNamespace(**run_path(str(ROOT / "examples" / "diffusion_drafter" / "compare.py")))


def test_the_tables_are_those_of_the_json(tmp_path: Path) -> None:
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


def test_figures() -> None:
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
