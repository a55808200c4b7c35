"""Positions as stock hands them on: of text alone for multimodal models, and rotary frequencies that follow them."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from support.compare import assert_identical
from support.multimodal import multimodal_target
from support.tiny import prompts, tiny_head, tiny_target
from surveys.small import build
from torch import nn
from transformers import BigBirdConfig, BigBirdForCausalLM, DynamicCache, MaxLengthCriteria, StoppingCriteriaList

from hf_dart import LookupDrafter, attach
from hf_dart.models.identity import as_before
from hf_dart.models.stock_steps import CACHE
from hf_dart.models.trial import check_verification, forget

GREEDY = {"do_sample": False}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 20,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize("mode", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["greedy", "T=1"])
def test_phi3_below_and_behind_its_switch(mode: dict[str, Any]) -> None:
    target = tiny_target("phi3_full", rope_parameters=LONGROPE, original_max_position_embeddings=20)
    head = tiny_head(target)
    for lengths in ([7], [9, 3, 7, 13]):
        assert_identical(target, head, prompts(lengths), **mode, max_length=21)
    for lengths in ([25], [25, 3, 7, 30]):
        assert_identical(target, head, prompts(lengths), **mode, max_length=55)


def test_hidden_states_that_another_thread_asked_for_meanwhile() -> None:
    """transformers' hooks for them, which stay, are not installed again."""
    target, ids = tiny_target("mistral"), prompts([5])
    with as_before(target):
        count = len(target(**ids, output_hidden_states=True).hidden_states)
    assert len(target(**ids, output_hidden_states=True).hidden_states) == count == 1 + len(target.model.layers)


def test_modules_that_a_short_text_replaces() -> None:
    """BigBird's sparse attention gives way to another module for good."""
    sizes = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "block_size": 4}
    target = BigBirdForCausalLM(BigBirdConfig(**sizes, is_decoder=True)).eval()
    parts = list(target.modules())
    with as_before(target):
        target(**prompts([12]))
        assert list(target.modules()) != parts
    assert list(target.modules()) == parts


@pytest.mark.parametrize("unpacks", [False, True])
@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_frequencies_are_as_before_the_trial(rope: dict[str, Any], unpacks: bool) -> None:
    """They follow the longest text that a model was run on, and windows have the trial run on long ones.

    So they are where the trial's first forward unpacks weights, which are not packed again.
    """
    fields = {"sliding_window": 16, "rope_parameters": rope, "max_position_embeddings": 20}
    target = tiny_target("mistral", **fields)
    stock = target.generate(**prompts([21]), max_length=45, **GREEDY)
    fresh = tiny_target("mistral", **fields)
    rotary = fresh.model.rotary_emb
    if unpacks:

        def unpack(model: Any, inputs: Any) -> None:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
            model.unpacked = True
            hook.remove()

        hook = fresh.register_forward_pre_hook(unpack)
        forget(fresh)
    own = dict(vars(rotary))
    buffers = {name: (buffer, buffer.clone()) for name, buffer in rotary.named_buffers()}
    check_verification(fresh, 45, 8)
    attach(fresh)
    assert unpacks == hasattr(fresh, "unpacked")
    assert own.items() <= vars(rotary).items() if unpacks else vars(rotary) == own  # a first forward may keep more
    for name, (buffer, content) in buffers.items():
        assert unpacks or getattr(rotary, name) is buffer
        assert torch.equal(getattr(rotary, name), content)
    if rope is LONGROPE:
        ours = fresh.generate(**prompts([21]), max_length=45, **GREEDY, assistant=LookupDrafter())
        assert torch.equal(ours, stock)


def test_a_text_that_ends_at_the_end_of_a_decoders_table() -> None:
    """Whisper's is of "max_target_positions"."""
    target, inputs = build("WhisperForCausalLM", "sdpa"), prompts([248], seed=2)
    end = target.generate(**inputs, **GREEDY, max_length=256)[0, -1:].tolist()
    assert_identical(target, tiny_head(target), inputs, **GREEDY, max_length=300, eos_token_id=end)


def test_crossings_are_refused() -> None:
    """The last token of a text is not run through the model: one more than the table was trained for fits."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(40)])  # in the place of what the options say
    for family, fields, lengths in (
        ("phi3_full", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 20}, [7]),
        ("phi3_full", {"original_max_position_embeddings": 20}, [7]),
        ("llama", {"rope_parameters": LONGROPE}, [7]),
        ("llama", {"rope_parameters": LONGROPE}, [9, 3, 7, 13]),
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 20}, [9, 4]),
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 20}, [25, 3]),
    ):
        target = tiny_target(family, **fields)
        head = tiny_head(target)
        short = max(lengths) <= 20
        asked = {"max_length": 22 if short else 40}, {"max_new_tokens": 5, "stopping_criteria": criteria}
        for fewer, reach in zip((1, 19), asked, strict=True):
            shorter = rf"ask for fewer tokens \(by {fewer}\), or " if short else ""
            with pytest.raises(ValueError, match=f"too; {shorter}leave assistant= out"):
                target.generate(**prompts(lengths), **reach, assistant=head)
        if short:
            assert_identical(target, head, prompts(lengths), **GREEDY, max_length=21)


def test_positions_of_ones_own_and_cached_texts_cross_it_too() -> None:
    target = tiny_target("llama", rope_parameters=LONGROPE)
    head, inputs = tiny_head(target), prompts([7])
    later = torch.arange(5, 12)[None]
    assert_identical(target, head, {**inputs, "position_ids": later}, **GREEDY, max_length=16)
    with pytest.raises(ValueError, match=r"ask for fewer tokens \(by 1\)"):
        target.generate(**inputs, position_ids=later, max_length=17, assistant=head)
    cache = DynamicCache(config=target.config)
    known = target.generate(**inputs, **{CACHE: cache}, **GREEDY, max_length=12)
    new = {"input_ids": known[:, -1:], "attention_mask": torch.ones_like(known)}
    with pytest.raises(ValueError, match=r"ask for fewer tokens \(by 30\)"):
        target.generate(**new, **{CACHE: cache}, max_length=40, assistant=head)
    runs = [{CACHE: copy.deepcopy(cache), **drafting} for drafting in ({}, {"assistant": head})]
    assert torch.equal(*(target.generate(**new, **GREEDY, max_length=10, **its) for its in runs))
    longer = torch.cat([known, prompts([14])["input_ids"]], dim=1)
    with pytest.raises(ValueError, match="beyond 20 positions"):
        target.generate(longer, **{CACHE: cache}, max_length=40, assistant=head)


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "llava"])
def test_text_alone_for_multimodal_models(family: str) -> None:
    target = multimodal_target(family)
    head = tiny_head(target)
    inputs = {name: values % 43 for name, values in prompts([9, 3, 7, 13]).items()}  # no image's tokens
    assert_identical(target, head, inputs, do_sample=True, top_k=0, max_new_tokens=20)
    assert head.last_stats.tau > 1
    # Where generate encodes images before the prefill (from 5.18 on), what a processor adds to text alone is no matter.
    marks = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}
    if family in marks and "mm_encoder_outputs" in inspect.signature(target.forward).parameters:
        inputs[marks[family]] = torch.zeros_like(inputs["input_ids"])
    assert_identical(target, head, inputs, **GREEDY, max_new_tokens=20)
