"""How the packaged target is made deeper (examples/demo_pair/train_target.py)."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.tiny import tiny_target

EXAMPLES = Path(__file__).parents[2] / "examples" / "demo_pair"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("train_target")


@pytest.mark.parametrize("layers", [3, 5, 7])
def test_a_deeper_target_begins_as_the_same_function(script: ModuleType, layers: int) -> None:
    shallow = tiny_target("qwen3")
    deep = script.deepened(shallow, layers).eval()
    ids = torch.randint(0, shallow.config.vocab_size, (2, 9))
    assert len(deep.model.layers) == layers
    assert torch.equal(deep(input_ids=ids).logits, shallow(input_ids=ids).logits)
