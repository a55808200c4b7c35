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


def test_muon_and_adamw_go_on_from_what_they_saved(script: ModuleType) -> None:
    ids = torch.randint(0, 20, (2, 9))

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    whole = tiny_target("qwen3")
    begun = tiny_target("qwen3")
    before = whole.model.layers[0].mlp.up_proj.weight.clone()
    steps(whole, script.HiddenMuon(whole, 1e-3), 4)
    first = script.HiddenMuon(begun, 1e-3)
    steps(begun, first, 2)
    second = script.HiddenMuon(begun, 5.0)  # its rate comes from what was saved
    second.load_state_dict(first.state_dict())
    steps(begun, second, 2)
    assert not torch.equal(before, whole.model.layers[0].mlp.up_proj.weight)
    for one, other in zip(whole.parameters(), begun.parameters(), strict=True):
        assert torch.equal(one, other)
