"""Tiny random heads of EAGLE, P-EAGLE and DART's code in the formats that are published, and what these compute.

`forward` follows the published definitions step by step, without a cache and without a mask of more than one token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.checkpoints import Plain, changed, draft_vocabulary, layer_shapes, random_weights, save, speculators_fields

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
    scored = {"draft_vocab_size": text.vocab_size, "tie_word_embeddings": False}
    layer: dict[str, Any] = {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": text.hidden_size, "head_dim": 8,
        "intermediate_size": 40, "max_position_embeddings": 2048, "num_attention_heads": 4, "num_hidden_layers": 1,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": text.vocab_size,
    }  # fmt: skip
    config: dict[str, Any] = {
        **layer, **scored, "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0, "torch_dtype": "float16", "transformers_version": "4.28.1", "use_cache": True,
    }  # fmt: skip
    if style == SPECULATORS:
        config = {
            **scored, "architectures": ["Eagle3Speculator"], "dtype": "float64", "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3], **speculators_fields(target, "eagle3", 5),
            "target_hidden_size": None, "transformers_version": "5.19.0",
            "transformer_layer_config": {**layer, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        }  # fmt: skip
    if style == MODELOPT:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": dict(_EAGLE)}
    if style == SPECULATORS:
        inside = {*layer, *_LAYER}
        changes = {"transformer_layer_config__" * (name in inside) + name: one for name, one in changes.items()}
    return changed(config, changes)


_EAGLE = {
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2], "next_layer_regular": True, "use_aux_hidden_state": True,
    "parallel_draft_heads_num_layers": None, "parallel_draft_step": None, "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True, "use_mtp_layernorm": False,
}  # fmt: skip
_LAYER = ("attention_bias", "mlp_bias", "layer_types", "sliding_window", "use_sliding_window", "rope_parameters",
          "rope_scaling", "rope_theta")  # fmt: skip

_EACH_NORM = [f"fc_norm.{tap}" for tap in range(4)]
_AUX_NORMS = ["aux_norm_low", "aux_norm_mid", "aux_norm_high"]


def layer_of(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of the decoder layer."""
    return config.get("transformer_layer_config", config)


def eagle3_tensors(
    config: dict[str, Any], *, first: str = "", own_embeddings: bool = False, taps: int = 0, seed: int = 0
) -> dict[str, Tensor]:
    """Random weights, in float64, with a draft vocabulary of some of the tokens if it is not whole.

    `first` is what the tensors of the first layer are called, and `taps` how many of the target's layers are fused, if
    that is other than its format's.
    """
    layer = layer_of(config)
    first = first or ("layers.0" if {"eagle_config", "speculators_model_type"} & config.keys() else "midlayer")
    taps = taps or len(config.get("target_layer_ids", config.get("eagle_aux_hidden_state_layer_ids", range(3))))
    generator = torch.Generator().manual_seed(seed)
    hidden = layer["hidden_size"]
    fused = taps * (feature := config.get("target_hidden_size") or hidden)
    scored, size = config.get("draft_vocab_size", layer["vocab_size"]), layer["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, fused), "norm.weight": (hidden,), "lm_head.weight": (scored, hidden),
        f"{first}.hidden_norm.weight": (hidden,),
    }  # fmt: skip
    further: list[tuple[Any, dict[str, tuple[int, ...]]]] = [
        (config.get("bias"), {"fc.bias": (hidden,)}),
        (config.get("norm_before_fc"), {"input_norm.weight": (fused,)}),
        (config.get("fc_norm"), {f"{name}.weight": (feature,) for name in _EACH_NORM[:taps]}),
        (config.get("use_aux_norm"), {f"{name}.weight": (feature,) for name in _AUX_NORMS}),
        (own_embeddings, {"embed_tokens.weight": (size, hidden)}),
        ("mask_token_id" in config, {"mask_hidden": (1, 1, fused)}),
        ("draft_length" in config, {f"{first}.mask_rep": (2 * hidden,)}),
    ]
    for wanted, more in further:
        shapes |= more if wanted else {}
    for index in range(layer["num_hidden_layers"]):
        name, read = (first, 2 * hidden) if index == 0 else (f"layers.{index}", hidden)
        shapes |= layer_shapes(layer, name, read)
    tensors = random_weights(shapes, generator)
    # DART's code always writes the map.
    mapped = scored != size or "draft_length" in config
    return tensors | (draft_vocabulary(size, scored, generator) if mapped else {})


def original_config(target: Any, **changes: Any) -> dict[str, Any]:
    """The config.json of a head in the format of DART's code; a change to None takes the field out."""
    own = {"architectures": ["LlamaForCausalLMDart"], "draft_length": 4, "rope_scaling": None, "rope_theta": 1000000}
    return eagle3_config(target, ORIGINAL, **{**own, **changes})


def original_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights of such a head, in float64, and the table of embeddings that its code saves too."""
    return eagle3_tensors(config, own_embeddings=True, seed=seed)


def original_checkpoint(folder: Path, target: Any, **changes: Any) -> str:
    config = original_config(target, **changes)
    return save(folder, config, original_tensors(config))


_PEAGLE = {
    "speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": 47,
    "speculators_config__algorithm": "peagle",
}  # fmt: skip
PEAGLE: dict[str, tuple[Any, ...]] = {
    "peagle": (SPECULATORS, _PEAGLE),
    "peagle, 0.9's defaults": (
        SPECULATORS,
        {**_PEAGLE, "architectures": ["PEagleDraftModel"], "norm_before_residual": True, "draft_vocab_size": 20,
         "model_type": "qwen3",
         "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "sliding_window": 6,
         "use_sliding_window": True},
        {"own_embeddings": True},
    ),
    "peagle, taps out of order": (SPECULATORS, {
        **_PEAGLE, "eagle_aux_hidden_state_layer_ids": [3, 1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "peagle, one norm": (SPECULATORS, {
        **_PEAGLE, "norm_before_fc": True, "norm_output": True, "rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "peagle, a norm for each layer": (SPECULATORS, {
        **_PEAGLE, "fc_norm": True, "attention_bias": True, "mlp_bias": True,
        "num_depths": 8, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2}),
}  # fmt: skip
VARIANTS: dict[str, tuple[Any, ...]] = {
    "original": (ORIGINAL, {}),
    "original, layers.0": (ORIGINAL, {"rope_theta": 500000.0}, {"first": "layers.0"}),
    "original, draft vocabulary": (ORIGINAL, {"draft_vocab_size": 20}),
    "original, linear": (ORIGINAL, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "original, llama3": (ORIGINAL, {"rope_scaling": LLAMA3, "rope_theta": 1e4}),
    "original, yarn": (ORIGINAL, {"rope_scaling": YARN}),
    "original, Qwen3-VL's": (
        ORIGINAL, {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True}}
    ),
    "original, head_dim from the shapes": (ORIGINAL, {}),
    "original, a table of its own": (ORIGINAL, {}, {"own_embeddings": True}),
    "original, a norm for each layer": (ORIGINAL, {"use_aux_norm": True}),
    "original, DeepSeek's": (
        ORIGINAL,
        {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "target_layer_ids": [0, 1, 3, 4, 6],
         "num_target_layers": 8, "ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1,
         "draft_vocab_size": None},
        {"first": "layers.0", "own_embeddings": True},
    ),
    "modelopt": (MODELOPT, {}),
    "modelopt, joint norm and bias": (MODELOPT, {"norm_before_fc": True, "bias": True}),
    "speculators": (SPECULATORS, {}),
    "speculators, normed residual": (SPECULATORS, {"norm_before_residual": True}),
    "speculators, 0.9's defaults": (SPECULATORS, {
        "norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "draft_vocab_size": 20,
        "model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 5, "use_sliding_window": True}),
    "speculators, a norm for each layer": (SPECULATORS, {"fc_norm": True, "norm_output": True}),
    "speculators, biases": (SPECULATORS, {"attention_bias": True, "mlp_bias": True}),
    "speculators, three layers": (SPECULATORS, {
        "num_hidden_layers": 3, "model_type": "qwen3", "sliding_window": 4, "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "speculators, four taps": (SPECULATORS, {"eagle_aux_hidden_state_layer_ids": [3, 1, 2, 0]}),
    "speculators, own table": (SPECULATORS, {}, {"own_embeddings": True}),
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
        style, changes, *options = {**VARIANTS, **PEAGLE}[name]
        config = eagle3_config(target, style, **changes)
        tensors = eagle3_tensors(config, **dict(*options))
    if name == "original, head_dim from the shapes":
        config["head_dim"] = 16
    return save(folder, config, tensors, pickled=name in ("original", "EAGLE-1"), dtype=dtype)


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
    tensors = {name: one if "norm" in name else 0.6 * one for name, one in tensors.items() if "o_proj.bias" not in name}
    table = target.get_input_embeddings().weight.detach().double().clone()
    return {**tensors, "embed_tokens.weight": table}


def forward(
    config: dict[str, Any], weights: dict[str, Tensor], embeddings: Tensor, features: Tensor, tokens: Tensor,
    path: list[int], masks: int = 0,
) -> Tensor:  # fmt: skip
    """EAGLE as published, over a text and then over a drafted path: logits [1 + len(path), V or M].

    P-EAGLE and DART's code have mask slots after the text instead: logits [1 + masks, V or M]. Features [T, F] are
    fused in the order of the config, and tokens [T] those after each position.
    """
    layer = layer_of(config)
    first = "midlayer" if "midlayer.hidden_norm.weight" in weights else "layers.0"
    embeddings = weights.get("embed_tokens.weight", embeddings)
    heads = layer["num_attention_heads"]
    plain = Plain(weights, layer, weights[f"{first}.self_attn.q_proj.weight"].shape[0] // heads)
    norm, project, text = plain.norm, plain.project, len(tokens)
    free = weights.get(f"{first}.mask_rep")
    if masks:
        tokens = torch.cat([tokens, torch.full((masks,), config.get("mask_token_id", 0))])
        slot = weights.get("mask_hidden", torch.zeros_like(features[:1])).reshape(1, -1)
        features = torch.cat([features, slot.expand(masks, -1)])
    if config.get("norm_before_fc"):
        features = norm(features, "input_norm")
    if norms := [name for name in _EACH_NORM + _AUX_NORMS if f"{name}.weight" in weights]:
        parts = zip(features.chunk(len(norms), -1), norms, strict=True)
        features = torch.cat([norm(part, name) for part, name in parts], -1)
    joined = f"{first}.hidden_norm.weight" not in weights
    fused = features if joined else project(features, "fc")
    keys, values = ([list[Tensor]() for _ in range(layer["num_hidden_layers"])] for _ in range(2))

    def one(token: Tensor, feature: Tensor, at: int, real: int) -> Tensor:
        """The output at one entry, after those before it; `real` is the last position of the text up to it."""
        if joined:
            x = residual = project(torch.cat([embeddings[token], feature]), "fc")
        elif free is not None and at >= text:
            x, residual = free, free[: len(feature)]
        else:
            known = norm(feature, f"{first}.hidden_norm")
            x = torch.cat([norm(embeddings[token], f"{first}.input_layernorm"), known])
            residual = known if config.get("norm_before_residual") else feature
        for index in range(layer["num_hidden_layers"]):
            name = first if index == 0 else f"layers.{index}"
            if index:
                residual, x = x, norm(x, f"{name}.input_layernorm")
            place = torch.tensor([at])
            query, key = (plain.rotate(plain.heads(x[None], f"{name}.self_attn.{part}"), place)[0] for part in "qk")
            keys[index].append(key)
            values[index].append(plain.heads(x, f"{name}.self_attn.v"))
            kinds = layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"]
            begin = max(0, real - layer["sliding_window"] + 1) if kinds[index] == "sliding_attention" else 0
            mixed = plain.attend(query, torch.stack(keys[index][begin:]), torch.stack(values[index][begin:]))
            x = residual + project(mixed, f"{name}.self_attn.o_proj")
            x = x + plain.mlp(norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
        return norm(x, "norm") if config.get("norm_output") else x

    states = [one(token, fused[at], at, at) for at, token in enumerate(tokens)][-1 - masks :]
    for step, token in enumerate(path):
        states.append(one(torch.tensor(token), states[-1], len(tokens) + step, len(tokens) - 1))
    out = torch.stack(states)
    for _ in range(0 if joined or config.get("norm_output") else 2 if free is not None else 1):
        out = norm(out, "norm")
    return project(out, "lm_head")
