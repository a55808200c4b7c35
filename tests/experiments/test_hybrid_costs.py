"""The page of costs on targets with running states says what its JSON does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.scripts import experiment

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("program", "report"), [("hybrid_costs", "costs.json"), ("tree_forms", "forms.json")])
def test_the_page_is_of_its_json(program: str, report: str) -> None:
    made, folder = experiment(program), ROOT / "model_cards" / "hybrid_costs"
    found = json.loads((folder / report).read_text())
    assert list(found.get("targets", [])) == list(getattr(made, "TARGETS", []))
    table = (folder / "README.md").read_text().split(made.MARKERS[0])[1].split(made.MARKERS[1])[0]
    assert table.strip().splitlines() == made.table(found)


def test_forms_are_measured() -> None:
    made = experiment("tree_forms")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    made.CONFIG |= {**sizes, "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    found = made.measured(rounds=1)
    assert list(found) == [str(size) for size in (1, *made.SIZES)]
    assert found["1"]["once"]["calls"] == found["1"]["levels"]["calls"]
    assert found["16"]["once"]["calls"] < 0.6 * found["16"]["levels"]["calls"]
