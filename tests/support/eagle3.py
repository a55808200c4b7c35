"""Tiny random EAGLE-3 and P-EAGLE checkpoints in the formats that are published, and what their code computes of them.

`forward` follows the published definitions step by step, without a cache and without a mask of more than one token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ORIGINAL, SPECULATORS, MODELOPT = "original", "speculators", "modelopt"
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def eagle3_config(target: Any, style: str = ORIGINAL, **changes: Any) -> dict[str, Any]:
    """A config.json for a tiny target; a change to None takes the field out.

    In the format of speculators, fields of the layer stand in `transformer_layer_config`, as there.
    """
    text = target.config.get_text_config(decoder=True)
    layer: dict[str, Any] = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": text.hidden_size,
        "head_dim": 8,
        "intermediate_size": 40,
        "max_position_embeddings": 2048,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": text.vocab_size,
    }
    if style == SPECULATORS:
        config: dict[str, Any] = {
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": text.vocab_size,
            "dtype": "float64",
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            "norm_before_residual": False,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{
                    "accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1,
                }],
                "verifier": {"architectures": [type(target).__name__], "name_or_path": "someone/target"},
            },
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "transformer_layer_config": {**layer, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "transformers_version": "5.19.0",
        }  # fmt: skip
    else:
        config = {
            **layer,
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": 1,
            "draft_vocab_size": text.vocab_size,
            "eos_token_id": 2,
            "initializer_range": 0.02,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "transformers_version": "4.28.1",
            "use_cache": True,
        }
    if style == MODELOPT:
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
                "next_layer_regular": True,
                "parallel_draft_heads_num_layers": None,
                "parallel_draft_step": None,
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
            },
        }
    inner = config.get("transformer_layer_config", {})
    for name, value in changes.items():
        part, _, field = name.rpartition("__")
        fields = config[part] if part else inner if name in {*layer, *_LAYER} and inner else config
        fields[field] = value
        if value is None and style != SPECULATORS:
            del fields[field]
    return config


_LAYER = ("attention_bias", "mlp_bias", "layer_types", "sliding_window", "use_sliding_window", "rope_parameters",
          "rope_scaling", "rope_theta")  # fmt: skip


def layer_of(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of the decoder layer."""
    return config.get("transformer_layer_config", config)


def eagle3_tensors(
    config: dict[str, Any], *, first: str = "midlayer", own_embeddings: bool = False, taps: int = 3, seed: int = 0
) -> dict[str, Tensor]:
    """Random weights, in float64, with a draft vocabulary of some of the tokens if it is not whole.

    Args:
        first: what the tensors of the first layer are called.
        own_embeddings: with a table of token embeddings.
        taps: how many of the target's layers are fused.
    """
    layer = layer_of(config)
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, size = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    feature = config.get("target_hidden_size") or hidden
    width, kv_width = layer["num_attention_heads"] * size, layer["num_key_value_heads"] * size
    scored, vocabulary = config["draft_vocab_size"], layer["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * feature), "norm.weight": (hidden,), "lm_head.weight": (scored, hidden),
        f"{first}.hidden_norm.weight": (hidden,),
    }  # fmt: skip
    if config.get("bias"):
        shapes["fc.bias"] = (hidden,)
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (taps * feature,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{tap}.weight": (feature,) for tap in range(taps)}
    if own_embeddings:
        shapes["embed_tokens.weight"] = (vocabulary, hidden)
    if "mask_token_id" in config:
        shapes["mask_hidden"] = (1, 1, taps * feature)
    for index in range(layer["num_hidden_layers"]):
        name, read = (first, 2 * hidden) if index == 0 else (f"layers.{index}", hidden)
        shapes |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
            f"{name}.self_attn.q_proj.weight": (width, read),
            f"{name}.self_attn.k_proj.weight": (kv_width, read),
            f"{name}.self_attn.v_proj.weight": (kv_width, read),
            f"{name}.self_attn.o_proj.weight": (hidden, width),
            f"{name}.mlp.gate_proj.weight": (inner, hidden),
            f"{name}.mlp.up_proj.weight": (inner, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, inner),
        }
        if layer["model_type"] == "qwen3":
            shapes |= {f"{name}.self_attn.{x}_norm.weight": (size,) for x in "qk"}
        biased = [f"self_attn.{x}_proj" for x in "qkvo"] * bool(layer.get("attention_bias"))
        biased += [f"mlp.{x}_proj" for x in ("gate", "up", "down")] * bool(layer.get("mlp_bias"))
        shapes |= {f"{name}.{part}.bias": shapes[f"{name}.{part}.weight"][:1] for part in biased}

    def random(shape: tuple[int, ...], norm: bool) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return 1 + 0.3 * values if norm else 0.3 * values

    tensors = {name: random(shape, "norm" in name) for name, shape in shapes.items()}
    if scored != vocabulary:
        chosen = torch.randperm(vocabulary, generator=generator)[:scored].sort().values
        tensors["d2t"] = chosen - torch.arange(scored)
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


def reordered(tensors: dict[str, Tensor], *per_token: str) -> dict[str, Tensor]:
    """The same checkpoint with its draft tokens, and the rows of the tensors `per_token`, in another order."""
    order = torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(1))
    tokens = (torch.arange(len(order)) + tensors["d2t"])[order]
    return {**tensors, **{name: tensors[name][order] for name in per_token}, "d2t": tokens - torch.arange(len(order))}


def save_eagle3(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, pickled: bool = False) -> str:
    """Write config.json and weights, as safetensors or as `pytorch_model.bin`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf8")
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


_PEAGLE = {
    "speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": 47,
    "speculators_config__algorithm": "peagle",
}  # fmt: skip
PEAGLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "peagle": (SPECULATORS, _PEAGLE, {"first": "layers.0"}),
    "peagle, 0.9's defaults": (
        SPECULATORS,
        {**_PEAGLE, "norm_before_residual": True, "draft_vocab_size": 20, "model_type": "qwen3",
         "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "sliding_window": 6,
         "use_sliding_window": True},
        {"first": "layers.0", "own_embeddings": True},
    ),
    "peagle, taps out of order": (
        SPECULATORS,
        {**_PEAGLE, "eagle_aux_hidden_state_layer_ids": [3, 1],
         "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"first": "layers.0", "taps": 2},
    ),
    "peagle, one norm": (
        SPECULATORS,
        {**_PEAGLE, "norm_before_fc": True, "norm_output": True, "rope_parameters": {**YARN, "rope_theta": 1e4}},
        {"first": "layers.0"},
    ),
    "peagle, a norm for each layer": (
        SPECULATORS, {**_PEAGLE, "fc_norm": True, "attention_bias": True, "mlp_bias": True}, {"first": "layers.0"}
    ),
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "original": (ORIGINAL, {}, {}),
    "original, layers.0": (ORIGINAL, {"rope_theta": 500000.0}, {"first": "layers.0"}),
    "original, draft vocabulary": (ORIGINAL, {"draft_vocab_size": 20}, {}),
    "original, linear": (ORIGINAL, {"rope_scaling": {"type": "linear", "factor": 4.0}}, {}),
    "original, llama3": (ORIGINAL, {"rope_scaling": LLAMA3, "rope_theta": 1e4}, {}),
    "original, yarn": (ORIGINAL, {"rope_scaling": YARN}, {}),
    "original, head_dim from the shapes": (ORIGINAL, {}, {}),
    "original, a table of its own": (ORIGINAL, {}, {"own_embeddings": True}),
    "modelopt": (MODELOPT, {}, {"first": "layers.0"}),
    "modelopt, joint norm and bias": (MODELOPT, {"norm_before_fc": True, "bias": True}, {"first": "layers.0"}),
    "speculators": (SPECULATORS, {}, {"first": "layers.0"}),
    "speculators, normed residual": (SPECULATORS, {"norm_before_residual": True}, {"first": "layers.0"}),
    "speculators, 0.9's defaults": (
        SPECULATORS,
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "draft_vocab_size": 20,
         "model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 5, "use_sliding_window": True},
        {"first": "layers.0"},
    ),
    "speculators, a norm for each layer": (SPECULATORS, {"fc_norm": True, "norm_output": True}, {"first": "layers.0"}),
    "speculators, biases": (SPECULATORS, {"attention_bias": True, "mlp_bias": True}, {"first": "layers.0"}),
    "speculators, three layers": (
        SPECULATORS,
        {"num_hidden_layers": 3, "model_type": "qwen3", "sliding_window": 4, "use_sliding_window": True,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"first": "layers.0"},
    ),
    "speculators, four taps": (
        SPECULATORS, {"eagle_aux_hidden_state_layer_ids": [3, 1, 2, 0]}, {"first": "layers.0", "taps": 4}
    ),
    "speculators, own table": (SPECULATORS, {}, {"first": "layers.0", "own_embeddings": True}),
}  # fmt: skip
"""Everything that is published, and differs in the pass: format, changes of the config, and of the tensors."""
JOINED: dict[str, dict[str, Any]] = {
    "EAGLE-1": {},
    "EAGLE-2, Qwen2's": {"model_type": "qwen2", "bias": False, "qkv_bias": True, "rope_theta": 1e6},
    "EAGLE-1, two layers": {"num_hidden_layers": 2, "bias": False},
}
"""Heads of EAGLE-1 and EAGLE-2, by the changes of their config."""


def variant(folder: Path, target: Any, name: str, dtype: torch.dtype = torch.float64) -> str:
    """A checkpoint of one of `VARIANTS`, `PEAGLE` or `JOINED`."""
    if name in JOINED:
        config = eagle3_config(target, draft_vocab_size=None, **JOINED[name])
        tensors = joined_tensors(config, target)
    else:
        style, changes, options = {**VARIANTS, **PEAGLE}[name]
        config = eagle3_config(target, style, **changes)
        tensors = eagle3_tensors(config, **options)
    made = {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()}
    if name == "original, head_dim from the shapes":
        config["head_dim"] = 16
    return save_eagle3(folder, config, made, pickled=name in ("original", "EAGLE-1"))


def joined_tensors(config: dict[str, Any], target: Any) -> dict[str, Tensor]:
    """Random weights of an EAGLE-1 head, and the target's table of embeddings, as that code saves it too."""
    whole = {"draft_vocab_size": config["vocab_size"], "bias": True, **config}
    tensors = eagle3_tensors({**whole, "attention_bias": config.get("qkv_bias")}, first="layers.0", taps=2)
    for name in ("norm", "lm_head", "layers.0.hidden_norm", "layers.0.input_layernorm"):
        del tensors[f"{name}.weight"]
    for part in "qkv":
        name = f"layers.0.self_attn.{part}_proj.weight"
        tensors[name] = tensors[name][:, : config["hidden_size"]].clone()
    # Queries, keys and values alone have biases there.
    # Nothing norms what goes into the LM head: smaller weights keep log-probabilities in the usual range.
    tensors = {
        name: one if "norm" in name else 0.6 * one for name, one in tensors.items() if "o_proj.bias" not in name
    }
    table = target.get_input_embeddings().weight.detach().double().clone()
    return {**tensors, "embed_tokens.weight": table}


def forward(
    config: dict[str, Any],
    weights: dict[str, Tensor],
    embeddings: Tensor,
    features: Tensor,
    tokens: Tensor,
    path: list[int],
    masks: int = 0,
) -> Tensor:
    """EAGLE as published, over a text and then over a drafted path: logits [1 + len(path), V or M].

    P-EAGLE has mask slots after the text instead: logits [1 + masks, V or M].

    Args:
        embeddings: [V, H].
        features: [T, F] of the target, fused in the order of the config.
        tokens: [T] those after each position.
        path: of drafted tokens, ids of the target.
        masks: how many mask slots.
    """
    layer = layer_of(config)
    first = "midlayer" if "midlayer.hidden_norm.weight" in weights else "layers.0"
    embeddings = weights.get("embed_tokens.weight", embeddings)
    eps, heads = layer["rms_norm_eps"], layer["num_attention_heads"]
    size = weights[f"{first}.self_attn.q_proj.weight"].shape[0] // heads

    def norm(x: Tensor, name: str) -> Tensor:
        return weights[f"{name}.weight"] * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()

    def project(x: Tensor, name: str) -> Tensor:
        out = x @ weights[f"{name}.weight"].T
        return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out

    if masks:
        tokens = torch.cat([tokens, torch.full((masks,), config["mask_token_id"])])
        features = torch.cat([features, weights["mask_hidden"].reshape(1, -1).expand(masks, -1)])
    if config.get("norm_before_fc"):
        features = norm(features, "input_norm")
    if config.get("fc_norm"):
        count = sum(name.startswith("fc_norm.") for name in weights)
        features = torch.cat([norm(x, f"fc_norm.{tap}") for tap, x in enumerate(features.chunk(count, -1))], -1)
    joined = f"{first}.hidden_norm.weight" not in weights
    fused = features if joined else project(features, "fc")
    cos, sin = rotations(layer, size, len(tokens) + len(path))
    keys: list[list[Tensor]] = [[] for _ in range(layer["num_hidden_layers"])]
    values: list[list[Tensor]] = [[] for _ in range(layer["num_hidden_layers"])]

    def rotate(x: Tensor, at: int) -> Tensor:  # [heads, size]
        half = torch.cat([-x[:, size // 2 :], x[:, : size // 2]], -1)
        return x * cos[at] + half * sin[at]

    def one(token: Tensor, feature: Tensor, at: int, real: int) -> Tensor:
        """The output at one entry, after those before it; `real` is the last position of the text up to it."""
        if joined:
            x = residual = project(torch.cat([embeddings[token], feature]), "fc")
        else:
            known = norm(feature, f"{first}.hidden_norm")
            x = torch.cat([norm(embeddings[token], f"{first}.input_layernorm"), known])
            residual = known if config.get("norm_before_residual") else feature
        for index in range(layer["num_hidden_layers"]):
            name = first if index == 0 else f"layers.{index}"
            if index:
                residual, x = x, norm(x, f"{name}.input_layernorm")
            query = project(x, f"{name}.self_attn.q_proj").view(-1, size)
            key = project(x, f"{name}.self_attn.k_proj").view(-1, size)
            if f"{name}.self_attn.q_norm.weight" in weights:
                query, key = norm(query, f"{name}.self_attn.q_norm"), norm(key, f"{name}.self_attn.k_norm")
            query, key = rotate(query, at), rotate(key, at)
            keys[index].append(key)
            values[index].append(project(x, f"{name}.self_attn.v_proj").view(-1, size))
            kinds = layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"]
            begin = max(0, real - layer["sliding_window"] + 1) if kinds[index] == "sliding_attention" else 0
            seen = [*range(begin, real + 1), *range(real + 1, at + 1)]
            mixed = torch.zeros(heads, size, dtype=x.dtype)
            for head in range(heads):
                shared = head // (heads // layer["num_key_value_heads"])
                scores = torch.stack([keys[index][place][shared] for place in seen]) @ query[head] / size**0.5
                mixed[head] = scores.softmax(-1) @ torch.stack([values[index][place][shared] for place in seen])
            x = residual + project(mixed.flatten(), f"{name}.self_attn.o_proj")
            inside = norm(x, f"{name}.post_attention_layernorm")
            act = torch.nn.functional.silu(project(inside, f"{name}.mlp.gate_proj"))
            x = x + project(act * project(inside, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        return norm(x, "norm") if config.get("norm_output") else x

    states: list[Tensor] = []
    for at, token in enumerate(tokens):
        state = one(token, fused[at], at, at)
        states.append(state)
    states = states[-1 - masks :]
    for step, token in enumerate(path):
        states.append(one(torch.tensor(token), states[-1], len(tokens) + step, len(tokens) - 1))
    out = torch.stack(states)
    return project(out if joined or config.get("norm_output") else norm(out, "norm"), "lm_head")


def rotations(layer: dict[str, Any], size: int, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin [T, size], of the kinds that the variants use."""
    rope = layer.get("rope_scaling") or layer.get("rope_parameters") or {}
    theta = layer.get("rope_theta") or rope.get("rope_theta") or 10000.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    frequencies = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    scale = 1.0
    if kind == "linear":
        frequencies = frequencies / rope["factor"]
    elif kind == "llama3":
        trained, factor = rope["original_max_position_embeddings"], rope["factor"]
        turns = trained * frequencies / (2 * torch.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - share) * frequencies / factor + share * frequencies
    elif kind == "yarn":
        trained, factor = rope["original_max_position_embeddings"], rope["factor"]
        ends = [size * torch.log(torch.tensor(trained / (turns * 2 * torch.pi))) / (2 * torch.log(torch.tensor(theta)))
                for turns in (32, 1)]  # fmt: skip
        low, high = max(int(ends[0].floor()), 0), min(int(ends[1].ceil()), size - 1)
        ramp = ((torch.arange(size // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
        frequencies = frequencies / factor * ramp + frequencies * (1 - ramp)
        scale = 0.1 * float(torch.log(torch.tensor(factor))) + 1
    angles = torch.arange(positions)[:, None] * torch.cat([frequencies, frequencies])
    return angles.cos() * scale, angles.sin() * scale
