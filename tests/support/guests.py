"""Tiny random checkpoints in the formats of other projects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_dart import DFlashDrafter, TreeConfig

ZLAB, ASSISTANT = "z-lab", "assistant"


def dflash_config(target: Any, style: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a DFlash drafter for a tiny target; a change to None takes the field out.

    `dflash_config__x` is the field x inside `dflash_config`.
    """
    text = target.config.get_text_config(decoder=True)
    taps = list(range(text.num_hidden_layers))
    config: dict[str, Any] = {
        "dtype": "float64",
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": text.hidden_size,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "transformers_version": "5.15.0",
    }
    if style == ZLAB:
        config |= {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "attention_bias": False,
            "block_size": 6,
            "dflash_config": {"mask_token_id": text.vocab_size - 1, "target_layer_ids": taps},
            "layer_types": ["full_attention"] * 2,
            "max_window_layers": 2,
            "model_type": "qwen3",
            "num_target_layers": text.num_hidden_layers,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": text.vocab_size,
        }
    else:
        config |= {
            "architectures": ["MuseGlimmerAssistantModel"],
            "block_size": 6,
            "layer_types": ["full_attention", "sliding_attention"],
            "mask_token_id": text.vocab_size - 1,
            "model_type": "muse_glimmer_assistant",
            "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
            "sliding_window": 5,
            "target_layer_ids": taps,
        }
    for name, value in changes.items():
        part, _, inner = name.rpartition("__")
        fields = config[part] if part else config
        fields[inner] = value
        if value is None:
            del fields[inner]
    return config


def dflash_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights, in float64, under the names of the config's format."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width, kv_width = (
        config["hidden_size"],
        *(config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")),
    )
    zlab = "dflash_config" in config
    taps = config["dflash_config" if zlab else "target_layer_ids"]
    taps = taps["target_layer_ids"] if zlab else taps
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight" if zlab else "encoder.fc.weight": (hidden, len(taps) * hidden),
        "hidden_norm.weight" if zlab else "encoder.output_norm_enc.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_norm.weight": (config["head_dim"],),
            "self_attn.k_norm.weight": (config["head_dim"],),
            "self_attn.q_proj.weight": (width, hidden),
            "self_attn.k_proj.weight": (kv_width, hidden),
            "self_attn.v_proj.weight": (kv_width, hidden),
            "self_attn.o_proj.weight": (hidden, width),
            "mlp.gate_proj.weight": (config["intermediate_size"], hidden),
            "mlp.up_proj.weight": (config["intermediate_size"], hidden),
            "mlp.down_proj.weight": (hidden, config["intermediate_size"]),
        }
        if config.get("attention_bias"):
            biased = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
            layer |= {f"{name}.bias": layer[f"{name}.weight"][:1] for name in biased}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}

    def random(shape: tuple[int, ...], norm: bool) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return 1 + 0.3 * values if norm else 0.3 * values

    return {name: random(shape, "norm" in name) for name, shape in shapes.items()}


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def dflash_checkpoint(folder: Path, target: Any, style: str, **changes: Any) -> str:
    config = dflash_config(target, style, **changes)
    return save(folder, config, dflash_tensors(config))


def original_config(target: Any, **changes: Any) -> dict[str, Any]:
    """The config.json of a head in the format of DART's code; a change to None takes the field out."""
    text = target.config.get_text_config(decoder=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMDart"],
        "bos_token_id": 1,
        "draft_length": 4,
        "draft_vocab_size": text.vocab_size,
        "eos_token_id": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": text.hidden_size,
        "intermediate_size": 40,
        "max_position_embeddings": 128,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "torch_dtype": "bfloat16",
        "vocab_size": text.vocab_size,
    }
    return {name: value for name, value in {**config, **changes}.items() if value is not None}


def original_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights, in float64, and a draft vocabulary of every second and third token if it is not whole."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, scored = (config[name] for name in ("hidden_size", "intermediate_size", "draft_vocab_size"))
    width, kv_width = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "embed_tokens.weight": (config["vocab_size"], hidden),
        "fc.weight": (hidden, 3 * config.get("target_hidden_size", hidden)),
        "midlayer.mask_rep": (2 * hidden,),
        "midlayer.self_attn.q_proj.weight": (width, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv_width, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv_width, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, width),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (scored, hidden),
    }

    def random(shape: tuple[int, ...], norm: bool) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return 1 + 0.3 * values if norm else 0.3 * values

    tensors = {name: random(shape, "norm" in name) for name, shape in shapes.items()}
    chosen = torch.randperm(config["vocab_size"], generator=generator)[:scored].sort().values
    tensors["d2t"] = chosen - torch.arange(scored)
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


def original_checkpoint(folder: Path, target: Any, **changes: Any) -> str:
    config = original_config(target, **changes)
    return save(folder, config, original_tensors(config))


def dflash_drafter(folder: Path, target: Any, style: str = ZLAB, **changes: Any) -> DFlashDrafter:
    drafter = DFlashDrafter.from_pretrained(dflash_checkpoint(folder, target, style, **changes), target=target)
    drafter.tree_config = TreeConfig(nodes=8)
    return drafter


# ---- the published forward, on a whole text at once --------------------------------------------------------


def published(config: dict[str, Any], weights: dict[str, Tensor], features: Tensor, block: Tensor) -> Tensor:
    """z-lab's DFlash as its paper and code define it: features [T, F], block embeddings [n, H] to hidden [n, H].

    With the convolutions of DFlash2, and the windows of speculators, the fields of whose layer stand beside the others.
    """
    text, size, heads = len(features), config["head_dim"], config["num_attention_heads"]
    inner, count = config.get("dflash_config", {}), config["num_hidden_layers"]
    at = torch.arange(text + len(block))
    cos, sin = published_rotation(config, at)

    def norm(x: Tensor, name: str) -> Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)  # as Qwen3, in fp32
        return weights[f"{name}.weight"] * (x.float() * torch.rsqrt(variance + config["rms_norm_eps"])).to(x.dtype)

    def project(x: Tensor, name: str) -> Tensor:
        out = x @ weights[f"{name}.weight"].T
        return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out

    def rotate(x: Tensor, positions: Tensor) -> Tensor:  # [n, heads, size]
        half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
        return x * cos[positions][:, None] + half * sin[positions][:, None]

    def convolved(x: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
        if f"{name}.base_kernel" not in weights:
            return x, None
        given = project(x, f"{name}.kernel_projection").view(len(x), 2, taps, -1)
        return kernels(x, weights[f"{name}.base_kernel"][0], given[:, 0]), given[:, 1]

    def after(x: Tensor, name: str, given: Tensor | None) -> Tensor:
        return x if given is None else kernels(x, weights[f"{name}.base_kernel"][1], given)

    def kernels(x: Tensor, base: Tensor, given: Tensor) -> Tensor:
        out, group = torch.zeros_like(x), x.shape[1] // given.shape[2]
        for place in range(len(x)):
            for tap in range(min(taps, place + 1)):
                for channel in range(x.shape[1]):
                    factor = base[tap, channel] + given[place, tap, channel // group]
                    out[place, channel] += factor * x[place - tap, channel]
        return out

    taps = inner.get("conv_kernel_size", config.get("conv_kernel_size", 2))
    known, x = norm(project(features, "fc"), "hidden_norm"), block
    for index in range(count):
        name = f"layers.{index}"
        kinds = config.get("layer_types")
        windowed = config.get("use_sliding_window") and index >= config.get("max_window_layers", 0)
        slides = kinds[index] == "sliding_attention" if kinds else windowed
        causal = config.get("is_causal", inner.get("causal", inner.get("causal_head", slides)))
        normed, given = convolved(norm(x, f"{name}.input_layernorm"), f"{name}.attention_conv")
        both = torch.cat([known, normed])
        query = norm(project(normed, f"{name}.self_attn.q_proj").view(len(block), -1, size), f"{name}.self_attn.q_norm")
        key = norm(project(both, f"{name}.self_attn.k_proj").view(len(both), -1, size), f"{name}.self_attn.k_norm")
        value = project(both, f"{name}.self_attn.v_proj").view(len(both), -1, size)
        query, key = rotate(query, at[text:]), rotate(key, at)
        mixed = torch.zeros_like(query)
        for place in range(len(block)):
            seen = torch.ones(len(both), dtype=torch.bool)
            distance = text + place - at
            if causal:
                seen &= distance >= 0
            if slides and "speculators_model_type" in config:
                seen &= text - at <= config["sliding_window"]
            elif slides:
                seen &= (distance < config["sliding_window"]) & (-distance < config["sliding_window"])
            for head in range(heads):
                shared = head // (heads // config["num_key_value_heads"])
                scores = key[seen, shared] @ query[place, head] / size**0.5
                mixed[place, head] = scores.softmax(-1) @ value[seen, shared]
        x = x + after(project(mixed.flatten(1), f"{name}.self_attn.o_proj"), f"{name}.attention_conv", given)
        inside, given = convolved(norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp_conv")
        act = torch.nn.functional.gelu if config["hidden_act"] == "gelu" else torch.nn.functional.silu
        mixed = act(project(inside, f"{name}.mlp.gate_proj")) * project(inside, f"{name}.mlp.up_proj")
        x = x + after(project(mixed, f"{name}.mlp.down_proj"), f"{name}.mlp_conv", given)
    return norm(x, "norm")


def published_rotation(config: dict[str, Any], at: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, head_dim], by the formulas of transformers' rope kinds."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta, size = rope.get("rope_theta") or config["rope_theta"], config["head_dim"]
    frequencies = 1.0 / (theta ** (torch.arange(0, size, 2).float() / size))
    scale = 1.0
    if rope.get("rope_type", "default") != "default":
        from transformers import Qwen3Config
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        full = Qwen3Config(
            head_dim=size, max_position_embeddings=config["max_position_embeddings"],
            rope_parameters={**rope, "rope_theta": theta},
        )  # fmt: skip
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](full, torch.device("cpu"))
    angles = at[:, None].float() * frequencies
    angles = torch.cat([angles, angles], -1)
    return (angles.cos() * scale).double(), (angles.sin() * scale).double()
