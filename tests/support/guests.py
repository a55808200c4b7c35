"""Tiny random DFlash checkpoints in z-lab's format, and what its code computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_dart import DFlashDrafter, TreeConfig
from support.checkpoints import Plain, changed, layer_shapes, random_weights, save


def dflash_config(target: Any, **changes: Any) -> dict[str, Any]:
    """The config.json of a DFlash drafter for a tiny target; a change to None takes the field out.

    `dflash_config__x` is the field x inside `dflash_config`.
    """
    text = target.config.get_text_config(decoder=True)
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "attention_bias": False,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 6,
        "dflash_config": {"mask_token_id": text.vocab_size - 1, "target_layer_ids": [*range(text.num_hidden_layers)]},
        "dtype": "float64", "head_dim": 8, "hidden_act": "silu", "hidden_size": text.hidden_size,
        "intermediate_size": 48, "layer_types": ["full_attention"] * 2, "max_position_embeddings": 256,
        "max_window_layers": 2, "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "num_target_layers": text.num_hidden_layers, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "transformers_version": "5.15.0",
        "use_sliding_window": False, "vocab_size": text.vocab_size,
    }
    return changed(config, changes)


def dflash_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights, in float64, under the names of the config's format."""
    hidden, taps = config["hidden_size"], config["dflash_config"]["target_layer_ids"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(taps) * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(config, f"layers.{index}", hidden)
    return random_weights(shapes, torch.Generator().manual_seed(seed))


def dflash_checkpoint(folder: Path, target: Any, **changes: Any) -> str:
    config = dflash_config(target, **changes)
    return save(folder, config, dflash_tensors(config))


def dflash_drafter(folder: Path, target: Any, **changes: Any) -> DFlashDrafter:
    drafter = DFlashDrafter.from_pretrained(dflash_checkpoint(folder, target, **changes), target=target)
    drafter.tree_config = TreeConfig(nodes=8)
    return drafter


def published(config: dict[str, Any], weights: dict[str, Tensor], features: Tensor, block: Tensor) -> Tensor:
    """z-lab's DFlash as its paper and code define it: features [T, F], block embeddings [n, H] to hidden [n, H].

    With the convolutions of DFlash2, and the windows of speculators, the fields of whose layer stand among the others.
    """
    text, inner = len(features), config.get("dflash_config", {})
    at, plain = torch.arange(text + len(block)), Plain(weights, config, config["head_dim"], torch.float32)
    norm, project = plain.norm, plain.project

    def convolved(x: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
        if f"{name}.base_kernel" not in weights:
            return x, None
        given = project(x, f"{name}.kernel_projection").view(len(x), 2, taps, -1)
        return kernels(x, weights[f"{name}.base_kernel"][0], given[:, 0]), given[:, 1]

    def after(x: Tensor, name: str, given: Tensor | None) -> Tensor:
        return x if given is None else kernels(x, weights[f"{name}.base_kernel"][1], given)

    def kernels(x: Tensor, base: Tensor, given: Tensor) -> Tensor:  # [T, H], [taps, H], [T, taps, groups]
        factors = base + given.repeat_interleave(x.shape[1] // given.shape[2], dim=-1)
        before = [torch.nn.functional.pad(x, (0, 0, tap, 0))[: len(x)] for tap in range(taps)]
        return (factors * torch.stack(before, dim=1)).sum(1)

    taps = inner.get("conv_kernel_size", config.get("conv_kernel_size", 2))
    known, x = norm(project(features, "fc"), "hidden_norm"), block
    for index in range(config["num_hidden_layers"]):
        name = f"layers.{index}"
        kinds = config.get("layer_types")
        windowed = config.get("use_sliding_window") and index >= config.get("max_window_layers", 0)
        slides = kinds[index] == "sliding_attention" if kinds else windowed
        causal = config.get("is_causal", inner.get("causal", inner.get("causal_head", slides)))
        normed, given = convolved(norm(x, f"{name}.input_layernorm"), f"{name}.attention_conv")
        both = torch.cat([known, normed])
        query = plain.rotate(plain.heads(normed, f"{name}.self_attn.q"), at[text:])
        key, value = (plain.heads(both, f"{name}.self_attn.{part}") for part in "kv")
        key = plain.rotate(key, at)
        mixed = []
        for place in range(len(block)):
            seen = torch.ones(len(both), dtype=torch.bool)
            distance = text + place - at
            if causal:
                seen &= distance >= 0
            if slides and "speculators_model_type" in config:
                seen &= text - at <= config["sliding_window"]
            elif slides:
                seen &= (distance < config["sliding_window"]) & (-distance < config["sliding_window"])
            mixed.append(plain.attend(query[place], key[seen], value[seen]))
        attended = project(torch.stack(mixed), f"{name}.self_attn.o_proj")
        x = x + after(attended, f"{name}.attention_conv", given)
        inside, given = convolved(norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp_conv")
        act = torch.nn.functional.gelu if config["hidden_act"] == "gelu" else torch.nn.functional.silu
        x = x + after(plain.mlp(inside, f"{name}.mlp", act), f"{name}.mlp_conv", given)
    return norm(x, "norm")
