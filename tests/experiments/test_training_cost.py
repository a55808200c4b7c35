"""`examples/experiments/training_cost.py`: steps of training beside the bare target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import training_cost


def test_training_is_measured_against_the_bare_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    words = ["--rows", "2", "--length", "48", "--blocks", "2,6", "--repeats", "2", "--json", str(file)]
    training_cost.main(words)
    assert "| x bare target |" in capsys.readouterr().out
    report = json.loads(file.read_text(encoding="utf8"))
    assert report["target_layers"] == 8
    bare, *steps = report["results"]
    assert [one["blocks"] for one in report["results"]] == [0, 2, 6]
    assert bare["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    for one in steps:
        ratios = [target / step for target, step in zip(bare["seconds"], one["seconds"], strict=True)]
        assert one["ratio"]["max"] == pytest.approx(max(ratios))
        assert one["tokens_per_second"]["max"] == pytest.approx(96 / min(one["seconds"]))
        assert one["peak_memory_bytes"] > 2**20
