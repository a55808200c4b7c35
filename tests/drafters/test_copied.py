"""Heads of layers that are copied from the target: what they start as, what is saved, what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from support.cases import GREEDY, SAMPLED
from support.compare import assert_identical, tally
from support.heads import drafts, in_one_pass, shaken
from support.sentences import refused
from support.tiny import prompts, tiny_head, tiny_target

from hf_dart import DartHead

EXACT = tally("float64, heads of copied layers")


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
COPIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {**SCALED, "original_max_position_embeddings": 64, "rope_theta": 1e4}},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
}


@torch.no_grad()
@pytest.mark.parametrize("family", COPIES)
@pytest.mark.parametrize("layers", [1, 2])
def test_a_copy_starts_as_the_target(family: str, layers: int) -> None:
    """The target's own logits at every real position, whatever the next token is."""
    target = tiny_target(family, **COPIES[family])
    depth = target.config.num_hidden_layers
    head = tiny_head(target, copy_layer="last", num_layers=layers, feature_layers=list(range(depth)))
    # As long as no window is left behind: a copy attends to all of the text.
    ids = prompts([4])["input_ids"]
    output = target(ids, output_hidden_states=True)
    features = torch.cat([output.hidden_states[index] for index in head.feature_layers], dim=-1)
    causal = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    hidden = head(features[:, :3], head.embed(ids[:, 1:]), torch.arange(3)[None], causal)
    torch.testing.assert_close(head.logits(hidden), output.logits[:, :3], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_copies_draft_and_are_not_saved(family: str, tmp_path: Path) -> None:
    target = tiny_target(family, **COPIES[family])
    head = tiny_head(target, copy_layer="last")
    with torch.no_grad():
        torch.nn.init.normal_(head.embedding_projection.weight, generator=torch.Generator().manual_seed(1))
        features = torch.randn(1, 6, head.config.features_width, dtype=torch.float64)
        tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
        proposal = head.propose(head.begin(1, 8), features, tokens, torch.tensor([6]))
        torch.testing.assert_close(proposal.logits[0], in_one_pass(head, features[0], tokens[0]))
    for options in (GREEDY, SAMPLED):
        assert_identical(target, head, prompts([9, 4]), **options, into=EXACT)
    head.save_pretrained(tmp_path / "copied")
    with safe_open(tmp_path / "copied" / "model.safetensors", "pt") as file:
        assert not any(name.startswith("layers.") for name in file.keys())  # noqa: SIM118
    loaded = DartHead.from_pretrained(str(tmp_path / "copied"), target=target)
    assert torch.equal(drafts(loaded), drafts(head))
    assert not any(p.requires_grad for p in loaded.layers.parameters())
    loaded.adopt_layers().save_pretrained(tmp_path / "own")
    assert torch.equal(drafts(DartHead.from_pretrained(str(tmp_path / "own"), target=target)), drafts(head))


def test_an_adapter_of_a_copy_brings_all_that_is_new(target: Any, tmp_path: Path) -> None:
    head = tiny_head(target, copy_layer=1, feature_layers=[1, 2], selector_rank=4)
    head.add_adapter(LoraConfig(r=2))
    shaken(head).save_pretrained(tmp_path / "adapter")
    load = partial(DartHead.from_pretrained, str(tmp_path / "adapter"))
    loaded = load(target=target)
    assert torch.equal(drafts(loaded), drafts(head))
    assert_identical(target, loaded, prompts([9, 4]), **SAMPLED, into=EXACT)
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
    assert not any(name.endswith("q_proj.weight") for name in names)
    rounded = tiny_target("qwen3").to(torch.bfloat16)
    load(target=rounded)
    for other in (tiny_target("qwen3", seed=1), tiny_target("llama")):
        refused(lambda other=other: load(target=other), ValueError, r"other weights there|cannot be copied")
    refused(load, ValueError, "pass target=")
    plain = drafts(loaded)
    loaded.merge_adapter().save_pretrained(tmp_path / "merged")
    merged = DartHead.from_pretrained(str(tmp_path / "merged"), target=target)
    torch.testing.assert_close(drafts(merged), plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "qwen3_moe", "granite", "phi3"])
def test_layers_built_otherwise_are_refused(family: str) -> None:
    refused(lambda: tiny_head(tiny_target(family), copy_layer="last"), ValueError, r"cannot be copied|decoder layers")


def test_what_a_copy_needs(target: Any) -> None:
    assert tiny_head(target, copy_layer=1, feature_layers=[0, 2]).feature_layers == [0, 1, 2]
    for wrong, word in (
        ({"copy_layer": 99}, "decoder layers"),
        ({"copy_layer": 1, "input_form": "pair"}, "'stream'"),
        ({"copy_layer": 1, "mask_mode": "peagle", "mask_token_id": 3, "feature_layers": [1]}, "input_form"),
        ({"input_form": "residual"}, "one of pair, stream"),
    ):
        refused(lambda wrong=wrong: tiny_head(target, **{"feature_layers": [1], **wrong}), ValueError, word)
