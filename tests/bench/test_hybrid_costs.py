"""The page of costs on targets with running states says what its JSON does."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def script() -> Any:
    spec = spec_from_file_location("hybrid_costs", ROOT / "examples" / "experiments" / "hybrid_costs.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_of_its_json() -> None:
    made, folder = script(), ROOT / "model_cards" / "hybrid_costs"
    found = json.loads((folder / "costs.json").read_text())
    assert list(found["targets"]) == list(made.TARGETS)
    table = (folder / "README.md").read_text().split(made.MARKERS[0])[1].split(made.MARKERS[1])[0]
    assert table.strip().splitlines() == made.table(found)


def test_a_level_and_its_state_are_measured() -> None:
    made = script()
    made._ALL |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_attention_heads": 4}
    found = made.measured("qwen3_5_text", rounds=1, repeats=1)
    assert found["level_cost"] is not None
    assert found["state_bytes"] > 0
    assert [size for size, _ in found["verify_costs"]] == list(made.SIZES)
