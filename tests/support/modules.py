"""Checkpoints with a random multi-token prediction module, in the names that families publish theirs by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from hf_dart.interop.mtp_module import _WithModules
from support.checkpoints import layer_shapes, random_weights, save, speculators_fields
from support.families import EXPERTS_IN_A_LOOP
from support.tiny import tiny_target


def _named(start: str, *names: str) -> dict[str, str]:
    """Ours to the names of the norms of embedding and hidden state, the projection, the last norm and the block."""
    ours = ("enorm.", "hnorm.", "eh_proj.", "post_norm.", "mtp_block.")
    return {f"layers.0.{own}": start + name for own, name in zip(ours, names, strict=True)}


# What Qwen3-Next and Qwen3.5 call them, and DeepSeek's and GLM's names after "model.layers.N.".
_QWENS = _named("mtp.", "pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "fc.", "norm.", "layers.0.")
_MIMOS = _named("model.mtp_layers.0.", "token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.", "")
_MIMO_V2S = {
    "layers.0.post_norm.": "model.mtp.layers.0.final_layernorm.",
    "layers.0.mtp_block.post_attention_layernorm.": "model.mtp.layers.0.pre_mlp_layernorm.",
    "layers.0.mtp_block.self_attn.sinks": "model.mtp.layers.0.self_attn.attention_sink_bias",
    "layers.0.mtp_block.": "model.mtp.layers.0.",
    "layers.0.": "model.mtp.layers.0.",
}
_MARKED = {"mimo": "model.mtp_layers.0.input_proj", "mimo_v2": "model.mtp.layers.0.eh_proj.", "qwen3_next": "mtp.fc."}
"""Families whose modules are told by the names of their tensors, and one of these."""
_NUMBERED = {"layers.0.mtp_block.": "", "layers.0.post_norm.": "shared_head.norm.", "layers.0.": ""}


def with_module(
    family: str, folder: Path, dtype: torch.dtype = torch.float64, target: Any = None
) -> tuple[Any, dict[str, Tensor]]:
    """A tiny target loaded from a folder that has a module as well, and that module's weights by `MtpModel`'s names."""
    own = "qwen2" if family == "mimo" else family
    target = tiny_target(own, dtype=dtype) if target is None else target
    target.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    if family == "mimo":
        content["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(content))
    if family == "qwen3_5":
        text = target.config.get_text_config(decoder=True)
        content.get("text_config", content)["mtp_num_hidden_layers"] = text.mtp_num_hidden_layers = 1
        (folder / "config.json").write_text(json.dumps(content))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = MtpModel(_WithModules(target, str(folder), [_MARKED.get(family, "")]), 1).to(dtype)
        own = {name: weight for name, weight in module.state_dict().items() if name.startswith("layers.")}
        for name, weight in own.items():
            torch.nn.init.normal_(weight, std=0.3, mean=1.0 * ("norm" in name and not family.startswith("qwen")))
    weights = load_file(folder / "model.safetensors")
    published = {"mimo": _MIMOS, "mimo_v2": _MIMO_V2S}
    names = _QWENS if family.startswith("qwen") else published.get(family, _NUMBERED)
    prefix = f"model.layers.{target.config.num_hidden_layers}." if names is _NUMBERED else ""
    for name, weight in own.items():
        start = next(start for start in names if name.startswith(start))
        _publish(weights, prefix + names[start] + name.removeprefix(start), weight)
    if prefix:  # copies of what the target has
        weights[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    options = {"experts_implementation": "eager"} if family in EXPERTS_IN_A_LOOP else {}
    return type(target).from_pretrained(folder, dtype=dtype, **options).eval(), own


def speculators_module(folder: Path, target: Any, weights: dict[str, Tensor] | None = None) -> str:
    """The files of a head of speculators for a tiny target; random weights, unless some are given."""
    config = target.config.to_dict()
    if weights is None:
        hidden, first = config["hidden_size"], "mtp_layers.0"
        norms = {f"{first}.{part}_layernorm.weight": (hidden,) for part in ("token", "hidden", "final")}
        shapes = {f"{first}.input_proj.weight": (hidden, 2 * hidden), **norms, **layer_shapes(config, first, hidden)}
        weights = random_weights(shapes, torch.Generator().manual_seed(0))
    fields = {"architectures": ["MTPDraftModel"], "num_nextn_predict_layers": 1, "transformer_layer_config": config}
    return save(folder, {**fields, **speculators_fields(target, "mtp", 1)}, weights)


def _publish(weights: dict[str, Tensor], name: str, weight: Tensor) -> None:
    """Experts lie one by one in checkpoints."""
    if name.endswith("experts.gate_up_proj"):
        for number, both in enumerate(weight):
            gate, up = both.chunk(2)
            start = f"{name.removesuffix('gate_up_proj')}{number}."
            weights[f"{start}gate_proj.weight"], weights[f"{start}up_proj.weight"] = gate.clone(), up.clone()
    elif name.endswith("experts.down_proj"):
        for number, down in enumerate(weight):
            weights[f"{name.removesuffix('down_proj')}{number}.down_proj.weight"] = down.clone()
    else:
        weights[name] = weight.contiguous()
