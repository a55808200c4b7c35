"""A drafter is added by one file: what is registered there is known wherever kinds of drafters are."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import assert_identical
from support.tiny import prompts, tiny_target

import hf_dart
from hf_dart import load_drafter
from hf_dart.drafters import registry
from hf_dart.drafters.registry import trainers
from hf_dart.hub.card import render_card
from hf_dart.hub.facts import HeadFacts
from hf_dart.hub.kinds import KINDS
from hf_dart.training.recipe import parser, read_recipe, trainer_of

TOY = '''
"""Repeats the token before: one file, and nothing else, makes it a kind of drafter."""

import torch
from torch import nn

from hf_dart.drafters.base import Proposal
from hf_dart.drafters.base_config import DrafterConfig
from hf_dart.drafters.trained import TrainedDrafter
from hf_dart.drafters.registry import register
from hf_dart.hub.kinds import CardTexts
from hf_dart.training.trainers.trainer import DrafterTrainer


class ToyConfig(DrafterConfig):
    model_type = "toy"


class ToyTrainer(DrafterTrainer):
    """Trains nothing yet."""


@register("toy", config=ToyConfig, trainer="toy_drafter:ToyTrainer",
          card=CardTexts("a toy", "toy", "toy", "A toy"))
class ToyDrafter(TrainedDrafter):
    described_as = "toy"

    def __init__(self, config):
        super().__init__(config)
        self.certain = nn.Embedding(1, 1)
        self.post_init()

    def _init_weights(self, module):
        nn.init.constant_(module.weight, 9.0)

    @property
    def cache_buffers(self):
        return 0

    def extend(self, state, features, next_tokens, counts):
        state.advance(counts)

    def propose(self, state, features, next_tokens, counts, depth=None):
        state.advance(counts)
        last = next_tokens.gather(1, (counts - 1).clamp(min=0)[:, None])
        hidden = torch.zeros(len(last), depth or self.draft_length, 1)
        logits = torch.zeros(*hidden.shape[:2], self.config.vocab_size)
        logits.scatter_(2, last[..., None].expand(-1, logits.shape[1], -1), float(self.certain.weight))
        return Proposal(logits, hidden)
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the toy, in a folder of its own."""
    registry.registered()
    kinds = dict(KINDS)
    (tmp_path / "toy_drafter.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("toy_drafter")
    sys.modules.pop("toy_drafter", None)
    KINDS.clear()
    KINDS.update(kinds)


def test_a_toy_is_known_everywhere(toy: Any, tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    made = toy.ToyDrafter.from_target(target)
    made.save_pretrained(tmp_path / "saved")
    drafter = load_drafter(str(tmp_path / "saved"), target=target)
    assert type(drafter) is toy.ToyDrafter
    assert torch.equal(drafter.certain.weight, made.certain.weight)
    tree = hf_dart.TreeConfig(nodes=8)
    for sampled in (False, True):
        options = {"do_sample": sampled, "max_new_tokens": 12, "tree_config": tree}
        assert_identical(target, drafter, prompts([5, 9]), **options)
    assert drafter.last_stats.rounds
    card = render_card(HeadFacts.read(tmp_path / "saved", repository="alice/toy", base_model="bob/target"))
    assert "A toy for [bob/target]" in card
    assert "from toy_drafter import ToyDrafter" in card
    assert hf_dart.ToyDrafter is trainers()["toy"][0] is toy.ToyDrafter
    assert trainer_of("toy") is toy.ToyTrainer
    flags = ["--drafter", "toy", "--output_dir", str(tmp_path), "--train_data", "x", "--draft_length", "3"]
    assert read_recipe(flags).head.drafter == "toy"
    assert "toy" in parser("eagle").format_help()


@pytest.mark.parametrize("value", [None, 3, [], ["dart"], {}, True], ids=str)
@pytest.mark.parametrize("field", ["model_type", "architectures", "speculators_model_type", "speculators_config"])
def test_damaged_configs_are_of_no_kind(field: str, value: Any) -> None:
    for kind in registry.registered().values():
        assert kind.recognises({field: value}, lambda: ()) is None
