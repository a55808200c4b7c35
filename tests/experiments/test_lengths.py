"""The measurement that model_cards/lengths quotes: what each method drafts after prompts of each length."""

from __future__ import annotations

import json
from pathlib import Path

from support.scripts import experiment

from hf_dart.hub.tables import STOCK

lengths = experiment("lengths")


def test_every_method_writes_stocks_text_at_every_length(tmp_path: Path) -> None:
    assert lengths.sizes("1k,300") == (1024, 300)
    words = ["--lengths", "40,90", "--windows", "36", "--new-tokens", "12", "--prompts", "1", "--repeats", "1"]
    assert lengths.main([*words, "--json", str(tmp_path / "found.json")]) == 0
    content = json.loads((tmp_path / "found.json").read_text(encoding="utf8"))
    found = {(one["prompt"], one["method"]): one for one in content["results"]}
    assert len(found) == 16
    assert all(one["identical"] for one in found.values())
    assert found[90, "head"]["tau"] > 1
    assert found[90, "head, window 36"]["draft_ms"] > 0
    assert found[90, STOCK]["ratio"]["median"] == 1
    assert "tau" not in found[90, STOCK]
