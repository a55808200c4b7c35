"""The measurement that model_cards/experts quotes: experts that the nodes of a tree choose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.scripts import experiment

experts = experiment("experts")


def test_more_nodes_choose_more_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 256, "moe_intermediate_size": 16}
    for name, (kind, fields) in experts.TARGETS.items():
        monkeypatch.setitem(experts.TARGETS, name, (kind, {**fields, **tiny}))
    experts.main(["--new-tokens", "24", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf8"))["results"]
    sparse = found["8 of 64 experts"]
    assert sparse[experts.STOCK]["experts"] == 8
    assert sparse["2"]["experts"] < sparse["8"]["experts"] < sparse["32"]["experts"] < 64
    assert found["dense"][experts.PACE]["experts"] == 0
