"""Text alone for multimodal models, which `AutoModelForCausalLM` gives for many checkpoints of today."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support.compare import assert_identical
from support.multimodal import multimodal_target
from support.tiny import prompts, tiny_head

from hf_dart.models.stock_steps import CACHE

GREEDY = {"do_sample": False, "max_new_tokens": 20}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 20}
# What a processor adds to text alone.
MARKS = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}
WORDS = 43  # no image's tokens


def encodes_first(model: Any) -> bool:
    """Does generate encode images before the prefill? Up to 5.17 it does not, and marks of tokens are refused."""
    return "mm_encoder_outputs" in inspect.signature(model.forward).parameters


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "llava"])
def test_text_alone(family: str) -> None:
    target = multimodal_target(family)
    head = tiny_head(target)
    inputs = {name: values % WORDS for name, values in prompts([9, 3, 7, 13]).items()}
    assert_identical(target, head, inputs, **SAMPLED)
    assert head.last_stats.tau > 1
    if family in MARKS and encodes_first(target):
        inputs[MARKS[family]] = torch.zeros_like(inputs["input_ids"])
    assert_identical(target, head, inputs, **GREEDY)
    first, second = (
        target.generate(**inputs, **GREEDY, return_dict_in_generate=True, **way) for way in ({}, {"assistant": head})
    )
    # Cache and all go on into a second turn.
    more = {"input_ids": torch.cat([first.sequences, first.sequences[:, :3]], dim=1)}
    more["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (0, 23), value=1)
    stock = target.generate(**more, **GREEDY, **{CACHE: first[CACHE]})
    ours = target.generate(**more, **GREEDY, **{CACHE: second[CACHE]}, assistant=head)
    assert torch.equal(stock, ours)
