"""Heads in the format of DART's released code: logits that are those of that code, and damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import MODES
from support.checkpoints import save
from support.compare import assert_identical
from support.eagle3 import forward, original_config, original_tensors
from support.heads import assert_saved, draft_after, features_of
from support.sentences import not_read
from support.tiny import prompts, tiny_target
from support.users import letters

from hf_dart import DartHead, TreeConfig


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("qwen3", num_hidden_layers=8)


def load(path: Path | str, target: Any, **options: Any) -> DartHead:
    head = DartHead.from_pretrained(str(path), target=target, **options)
    head.tree_config = TreeConfig(nodes=8)
    return head


VARIANTS: dict[str, dict[str, Any]] = {
    "whole vocabulary": {},
    "some tokens": {"draft_vocab_size": 30},
    "one slot": {"draft_length": 1},
    "no theta": {"rope_theta": None},
    "no head width": {"head_dim": None},
    "all heads": {"num_key_value_heads": None},
    "unknown to DART's code": {"sliding_window": 7, "attention_bias": True, "layer_types": ["x"]},
}


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_released_forward(target: Any, tmp_path: Path, variant: str) -> None:
    config = original_config(target, **VARIANTS[variant])
    full = {"head_dim": 8, "num_key_value_heads": 4, **config}
    tensors = original_tensors({**full, "attention_bias": False})
    head = load(save(tmp_path, config, tensors), target)
    assert head.feature_layers == [2, 4, 5]
    assert head.draft_length == config["draft_length"] + 1
    tokens = prompts([10], vocabulary=40)["input_ids"]
    features = features_of(target, head.feature_layers, tokens)[0]
    del tensors["embed_tokens.weight"]
    table, masks = target.get_input_embeddings().weight, config["draft_length"]
    theirs = forward(full, tensors, table, features, tokens[0, 1:], [], masks=masks)
    torch.testing.assert_close(draft_after(target, head, tokens).logits[0], theirs, rtol=1e-6, atol=1e-6)
    if variant in ("whole vocabulary", "some tokens"):
        ours = assert_saved(head, target, tmp_path / "ours")
        assert_identical(target, ours, prompts([7]), **MODES["greedy"], max_new_tokens=12)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "scaled rotations": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "a draft vocabulary larger than all": ({"draft_vocab_size": 49}, "draft_vocab_size"),
    "a draft too long": ({"draft_length": 31}, "draft_length"),
    "another width": ({"hidden_size": 64}, "hidden size 64"),
    "another vocabulary": ({"vocab_size": 50}, "t2d"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_config_must_not_say(target: Any, tmp_path: Path, name: str) -> None:
    changes, words = WRONG[name]
    tensors = original_tensors(original_config(target))
    path = save(tmp_path, original_config(target, **changes), tensors)
    not_read(lambda: load(path, target, tokenizer=letters("abc")), words)


@pytest.mark.parametrize("name", ["midlayer.mask_rep", "d2t"])
def test_what_the_weights_must_have(target: Any, tmp_path: Path, name: str) -> None:
    """What else is wrong with weights is seen in those of EAGLE, which the same function reads."""
    config = original_config(target, draft_vocab_size=30)
    tensors = original_tensors(config)
    del tensors[name]
    not_read(lambda: load(save(tmp_path, config, tensors), target), f"lack {name}")


def test_a_format_that_is_added_is_named_without_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DartHead, "reads", staticmethod(lambda content, _: content.get("kind")))
    path = str(save(tmp_path, {"kind": "a head of Zephyr"}, {"fc.weight": torch.zeros(2)}))
    not_read(lambda: DartHead.from_pretrained(path), "is a head of Zephyr, which does not say")
