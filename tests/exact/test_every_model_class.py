"""Every class that transformers maps: exact, refused in a sentence of ours, or stock itself fails."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from support.classes import QUICK, WAYS, Report, examine
from support.small import build, class_names

from hf_dart import DartHead, attach
from hf_dart.target.features import layer_count

CLASSES = class_names()
SAMPLE = random.Random(0).sample(CLASSES, 20)


def check(report: Report) -> None:
    assert not report.wrong
    assert not report.crashes
    assert report.exact or report.refused or report.stock_fails
    assert not report.exact or report.tau > 1


def test_a_sample() -> None:
    kinds = Counter()
    for name in SAMPLE:
        report = examine(name, QUICK)
        check(report)
        kinds[report.kind] += 1
    assert kinds["exact"] > len(SAMPLE) // 2, kinds


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("BltForCausalLM", "keeps its past in a cache of its own"),
        ("MambaForCausalLM", "keeps no keys and values"),
        ("ReformerModelWithLMHead", "cannot run plain text over a DynamicCache"),
        ("XLNetLMHeadModel", "cannot run plain text over a DynamicCache"),  # names a position table of -1
    ],
)
def test_what_cannot_be_taken_back_is_told_when_attaching(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} {says}.*; call generate without assistant=.$"):
        attach(build(name, "eager", torch.float32))


def test_layers_are_those_that_return_hidden_states() -> None:
    model = build("LongcatFlashForCausalLM", "eager")
    assert model.config.num_hidden_layers == 2 * layer_count(model)
    states = model(input_ids=torch.tensor([[2, 3, 4]]), output_hidden_states=True).hidden_states
    assert len(states) == layer_count(model) + 1
    assert max(DartHead.from_target(model).config.feature_layers) == layer_count(model)


@pytest.mark.matrix
@pytest.mark.parametrize("name", CLASSES)
def test_a_class(name: str) -> None:
    check(examine(name, WAYS))
