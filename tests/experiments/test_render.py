"""Tables in Markdown are those of their JSON, those of README and docs among them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.scripts import experiment
from support.sentences import refused

from hf_dart.hub.loading import PACKAGED_HEAD

RENDER = experiment("render")
BEGIN, END, PLOTS = RENDER.BEGIN, RENDER.END, RENDER.PLOTS
ROOT = Path(__file__).parents[2]
BENCH, DEEP_BENCH = (ROOT / "model_cards" / pair / "bench.json" for pair in ("demo_pair", "deep_pair"))


@pytest.mark.parametrize(
    ("page", "bench", "part"),
    [
        ("README.md", ROOT / "model_cards" / "gemma-3-270m" / "bench_bf16.json", "summary"),
        ("docs/measured.md", DEEP_BENCH, "speed"),
        ("docs/measured.md", BENCH, "summary"),
        ("docs/evidence.md", ROOT / "model_cards", "evidence"),
    ],
)
def test_pages_show_what_the_committed_json_says(page: str, bench: Path, part: str) -> None:
    file = ROOT / page
    text = file.read_text(encoding="utf8")
    json_file = Path(os.path.relpath(bench, file.parent)).as_posix()
    assert BEGIN.format(file=f"{json_file} {part}") in text
    assert RENDER.render_tables(text, file.parent) == text


CARDS = [*sorted((ROOT / "model_cards").glob("*/README.md")), ROOT / "docs" / "without_a_head.md"]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.parent.name)
def test_cards_show_what_their_json_says(card: Path) -> None:
    text = card.read_text(encoding="utf8")
    assert RENDER.render_tables(text, card.parent) == text


@pytest.mark.parametrize("folder", sorted((ROOT / "model_cards").glob(f"*/{PLOTS}")), ids=lambda path: path.parent.name)
def test_plots_show_what_their_json_says(folder: Path) -> None:
    (file,) = folder.parent.glob("*.json")
    assert {path: path.read_text(encoding="utf8") for path in folder.iterdir()} == RENDER.pictures(file)


def test_render_writes_tables_cards_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plots only where a folder waits for them."""
    content = json.loads(BENCH.read_text(encoding="utf8"))
    content["results"][2]["tau"] = 9.87
    (tmp_path / "bench.json").write_text(json.dumps(content), encoding="utf8")
    page, card = tmp_path / "page.md", tmp_path / "README.md"
    page.write_text(f"above\n\n{BEGIN.format(file='bench.json speed')}\nold\n{END}\nbelow\n", encoding="utf8")
    card.write_bytes((BENCH.parent / "README.md").read_bytes())
    assert RENDER.main([str(page)]) is None
    assert not (tmp_path / PLOTS).exists()
    (tmp_path / PLOTS).mkdir()
    capsys.readouterr()
    for expected in ("written again", "as it was"):
        assert RENDER.main([str(page), str(card), "--head", str(PACKAGED_HEAD)]) is None
        assert capsys.readouterr().out.splitlines()[-1].endswith(expected)
    for file in (page, card):
        assert "| 9.87 |" in file.read_text(encoding="utf8")
    text = page.read_text(encoding="utf8")
    assert text.startswith("above\n")
    assert text.endswith(f"{END}\nbelow\n")
    assert "old" not in text
    assert "draft ms" not in text
    drawn, committed = ({path.name for path in folder.iterdir()} for folder in (tmp_path / PLOTS, BENCH.parent / PLOTS))
    assert drawn == committed


def test_means_beside_copies_have_their_standard_error() -> None:
    """Each row weighs alike, and so do twice as fast and half as fast; there is no error of a single row."""
    methods = {"stock": (1, 1), "hf_dart, copies alone": (2, 4), "hf_dart": (2, 8)}
    rows = [
        {"mode": "greedy", "batch": 1, "method": method, "ratio": {"median": ratios[row]}}
        for row in range(2)
        for method, ratios in methods.items()
    ]
    assert RENDER.means({"results": rows}).splitlines()[-1] == (
        "| greedy, batch 1 | **3.00** (2.00) | **5.00** (2.00); 1.41 ± 0.49 (1.00) of copies |"
    )
    assert (
        RENDER.means({"results": rows[:3]}).splitlines()[-1]
        == "| greedy, batch 1 | **2.00** (2.00) | **2.00** (2.00) |"
    )


def test_a_table_without_an_end_is_refused(tmp_path: Path) -> None:
    refused(lambda: RENDER.render_tables(BEGIN.format(file="bench.json") + "\n", tmp_path), ValueError, "has no end")
