"""`examples/experiments/plots.py`: whole pictures, in which every word is text."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import plots
import pytest

from hf_dart.hub.tables import STOCK

BENCH = Path(__file__).parents[2] / "model_cards" / "demo_pair" / "bench.json"


def test_plots_are_whole_pictures() -> None:
    report = json.loads(BENCH.read_text(encoding="utf8"))
    hostile = "</text><script>alert(1)</script>&"
    results = [{**one, "text": f"{place % 2} {hostile}"} for place, one in enumerate(report["results"])]
    drawn = plots.plots({**report, "results": results})
    assert set(drawn) == {"speed", "depth", "phases", "speed_by_tau"}
    for svg in drawn.values():
        tree = ElementTree.fromstring(svg)
        assert not [piece for piece in tree.iter() if piece.tag.endswith("script")]
        assert "://" not in svg.replace("http://www.w3.org/2000/svg", "")
        assert any(hostile in (piece.text or "") for piece in tree.iter())
    bars = ElementTree.fromstring(drawn["speed"]).findall(".//{*}rect")
    assert len(bars) == 1 + sum(one["method"] != STOCK for one in results)  # the background first
    ratios = [one["ratio"]["median"] for one in results if one["method"] != STOCK]
    widths = [float(bar.attrib["width"]) for bar in bars[1:]]
    assert widths == pytest.approx([widths[0] / ratios[0] * ratio for ratio in ratios], rel=0.05, abs=0.2)
