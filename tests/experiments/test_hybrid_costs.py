"""The page of costs on targets with running states says what its JSON does."""

from __future__ import annotations

import json
from pathlib import Path

from support.scripts import experiment

ROOT = Path(__file__).parents[2]


def test_the_page_is_of_its_json() -> None:
    made, folder = experiment("hybrid_costs"), ROOT / "model_cards" / "hybrid_costs"
    found = json.loads((folder / "costs.json").read_text())
    assert list(found["targets"]) == list(made.TARGETS)
    table = (folder / "README.md").read_text().split(made.MARKERS[0])[1].split(made.MARKERS[1])[0]
    assert table.strip().splitlines() == made.table(found)


def test_a_level_and_its_state_are_measured() -> None:
    made = experiment("hybrid_costs")
    made._ALL |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_attention_heads": 4}
    found = made.measured("falcon_h1", rounds=1, repeats=1)
    assert found["level_cost"] is not None
    assert found["state_bytes"] > 0
    assert [size for size, _ in found["verify_costs"]] == list(made.SIZES)


def test_nothing_is_known_of_levels_where_none_is_computed_alone() -> None:
    made = experiment("hybrid_costs")
    made._ALL |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_attention_heads": 4}
    assert "level_cost" not in made.measured("qwen3_5_text", rounds=1, repeats=1)


def test_the_page_of_forms_is_of_its_json() -> None:
    made, folder = experiment("tree_forms"), ROOT / "model_cards" / "hybrid_costs"
    found = json.loads((folder / "forms.json").read_text())
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
