"""The table of docs/without_a_head.md, of a part of its calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.scripts import experiment

headless = experiment("headless")


def test_every_way_writes_stocks_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headless, "KINDS", headless.KINDS[1:2])
    headless.main(["--calls", "2", "--new-tokens", "12", "--json", str(tmp_path / "found.json")])
    content = json.loads((tmp_path / "found.json").read_text(encoding="utf8"))
    rows = [line.split(" | ") for line in content["markdown"].splitlines()[2:]]
    assert len(rows) == 5
    assert all(float(tau) >= 1 for *_, tau, _ in rows)
    assert float(rows[3][3]) > 1.3, "the packaged head drafts"
