"""Tiny multimodal targets, and prompts of theirs with images: two rows, padded, the images of different sizes."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from hf_dart.decoding.api import attach
from support.families import SIZES

TEXT = {**SIZES, "num_hidden_layers": 4}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
LINEAR = {
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}
TOWER = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
CLIP = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}
QWEN = {"image_token_id": 47, "video_token_id": 46, "vision_start_token_id": 45, "vision_end_token_id": 44}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **QWEN,
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {**TOWER, "fullatt_block_indexes": [1], "window_size": 8},
    },
    "qwen3_vl": {
        **QWEN,
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {**TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {
        **QWEN,
        "text_config": {**TEXT, **LINEAR, "rope_parameters": ROPE},
        "vision_config": {**TOWER, "num_position_embeddings": 64},
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**CLIP, "model_type": "clip_vision_model"},
        "image_token_index": 47,
    },
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "vision_config": CLIP,
        "mm_tokens_per_image": 4,
        "image_token_index": 47,
    },
}
"""Config fields by model type. Ids from 43 on are no words."""


def multimodal_target(family: str, **text: Any) -> Any:
    """A random target of `MULTIMODAL`, in float64, with other fields of its text's config; no generator is moved."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fields = MULTIMODAL[family]
        config = CONFIG_MAPPING[family](**{**fields, "text_config": {**fields["text_config"], **text}})
        model = AutoModelForImageTextToText.from_config(config).double().eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim > 1 and not weight.any():  # some projections begin as zeros
                    weight.normal_()
                if weight.ndim > 1 and "embed" not in name:
                    weight.mul_(4.0)
    return attach(model)


def image_inputs(family: str, rows: int = 2, seed: int = 0, image: int = 0, turned: bool = False) -> dict[str, Tensor]:
    """Prompts of up to two rows as a processor prepares them: text, an image, text; padded on the left.

    The images have a seed of their own, and the first one is the larger one if `turned`.
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(image)
    sizes = [(4, 4), (4, 8)] if family in _SIZED else [(4, 4)] * 2  # in patches
    sizes = sizes[::-1] if turned else sizes
    texts = []
    for (high, wide), before in zip(sizes[:rows], (3, 9), strict=False):
        image = [45, *[47] * (high * wide // 4), 44] if family in _SIZED else [47] * 4
        texts.append([draw.randrange(3, 43) for _ in range(before)] + image + [draw.randrange(3, 43) for _ in range(5)])
    ids = torch.tensor([[0] * (max(map(len, texts)) - len(text)) + text for text in texts])
    told = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    if family in _SIZED:
        told["image_grid_thw"] = torch.tensor([(1, *size) for size in sizes[:rows]])
        pixels = (sum(high * wide for high, wide in sizes[:rows]), 96)
        told["mm_token_type_ids"] = (ids == 47).long()
    else:
        pixels = (rows, 3, 8, 8)
    if family == "gemma3":
        told["token_type_ids"] = (ids == 47).long()
    told["pixel_values"] = torch.randn(pixels, generator=generator, dtype=torch.float64)
    return told


def after_images(
    family: str, inputs: dict[str, Tensor], sequences: Tensor, with_image: bool = False, more: int = 4
) -> dict[str, Tensor]:
    """The next turn's inputs: the text so far, a second image for each row if `with_image`, and more words."""
    new, mask = image_inputs(family, len(sequences), seed=5, image=5), inputs["attention_mask"]
    tail = new["input_ids"][:, -9:] if with_image else torch.arange(3, 3 + more).expand(len(sequences), -1)
    if with_image and family in _SIZED:  # of images as large as those of the first row
        tail = torch.cat([new["input_ids"][:, :0], tail.new_tensor([45, *[47] * 4, 44, 9, 8]).expand(2, -1)], dim=1)
        new["image_grid_thw"] = torch.tensor([(1, 4, 4)] * 2)
        new["pixel_values"] = new["pixel_values"][:32]
    ids = torch.cat([sequences, tail], dim=1)
    seen = mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])
    told = {"input_ids": ids, "attention_mask": torch.cat([mask, seen], dim=1)}
    if with_image:
        told |= {name: new[name] for name in ("pixel_values", "image_grid_thw") if name in new}
    return told


_SIZED = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
