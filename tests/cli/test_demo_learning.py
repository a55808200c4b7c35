"""`hf-dart demo --learn`: a fine-tuned target, a head that learns, and the text of stock."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_dart.bench.pair import load_pair
from hf_dart.cli import demo_learning


@pytest.mark.matrix
def test_the_demo_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_learning, "_TUNING", 3.0)
    monkeypatch.setattr(demo_learning, "_SERVING", 12.0)
    lines: list[str] = []
    assert demo_learning.demo(load_pair(), lines.append)
    first, tuned, last = (float(line.split(": ")[-1]) for line in lines if line.startswith(("tau of", "tau on")))
    assert tuned < first
    assert last > tuned
    assert lines[-1].startswith("identical: yes")


def test_fine_tuning_changes_the_weights_alone() -> None:
    pair = load_pair()
    before, state = copy.deepcopy(pair.model.state_dict()), torch.get_rng_state()
    demo_learning.fine_tune(pair.model, [[number + place for place in range(16)] for number in range(16)], 0.2)
    assert torch.equal(torch.get_rng_state(), state)
    after = pair.model.state_dict()
    same = {name.split(".")[-2]: torch.equal(weight, after.pop(name)) for name, weight in before.items()}
    assert not after
    assert (same["lm_head"], same["up_proj"]) == (True, False)
