"""Multimodal models on text alone: what `AutoModelForCausalLM` gives for many checkpoints of today."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support.compare import assert_identical
from support.families import SIZES
from support.multimodal import multimodal_target
from support.tiny import WINDOW, prompts, tiny_head
from transformers import Exaone4_5_Config, Exaone4_5_ForConditionalGeneration

from hf_dart.models.stock_steps import CACHE

GREEDY = {"do_sample": False, "max_new_tokens": 20}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 20}
# What a processor adds to text alone.
MARKS = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}
WORDS = 43  # no image's tokens


def exaone4_5() -> Any:
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_key_value_heads": 2}
    tokens = {"image_token_id": 47, "video_token_id": 46, "vision_start_token_id": 45, "vision_end_token_id": 44}
    slides = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
    text = {**SIZES, **slides, "model_type": "exaone4"}
    eyes |= {"out_hidden_size": 32, "patch_size": 4}
    config = Exaone4_5_Config(text_config=text, vision_config=eyes, **tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Exaone4_5_ForConditionalGeneration(config).double().eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim >= 2 and "embed" not in name:
                    weight.mul_(10.0)
    return model


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


def test_padding_that_counts_as_positions_is_followed() -> None:
    target = exaone4_5()
    head = tiny_head(target)
    for lengths in ([7], [9, 9], [9, 3]):
        inputs = prompts(lengths, vocabulary=44)
        assert_identical(target, head, inputs, **GREEDY)
    assert_identical(target, head, inputs, **SAMPLED)
