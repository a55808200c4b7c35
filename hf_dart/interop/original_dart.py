"""Reader of heads in the format of DART's released code (arXiv 2601.19278).

There a head has d - 1 mask slots and gives d distributions; it reads the target in front of layers 2, L // 2 and
L - 3, has an LM head of its own, norms the output of its layer twice, and maps its vocabulary to the target's by
offsets: token i of the draft is i + d2t[i] of the target. Token embeddings are always the target's.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hf_dart.hub.checkpoint import read_tensors
from hf_dart.interop.eagle3 import draft_tokens
from hf_dart.interop.fields import Fields
from hf_dart.models.features import default_feature_layers

_KIND = "DART head"
_MANY = 2**31 - 1
# Ours to theirs.
_NAMES = {
    "fc.weight": "fc.weight",
    "embedding_norm.weight": "midlayer.input_layernorm.weight",
    "feature_norm.weight": "midlayer.hidden_norm.weight",
    "mask_slot.weight": "midlayer.mask_rep",
    **{f"layers.0.self_attn.{x}_proj.weight": f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"},
    "layers.0.mlp_norm.weight": "midlayer.post_attention_layernorm.weight",
    **{f"layers.0.mlp.{x}_proj.weight": f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}


def original_format(content: dict[str, Any]) -> str | None:
    """What a config.json describes, if it is that of a head in the format of DART's code."""
    ours = content.get("model_type") == "llama" and "draft_length" in content
    return "a DART head in the format of DART's code" if ours else None


def read_weights(config: PreTrainedConfig, files: Iterable[str | Path], path: str) -> dict[str, Tensor]:
    """The weights of a head as DART's code published it, under our names.

    Args:
        config: made of `read_fields`.
        files: of safetensors.
        path: of the checkpoint, for messages.

    Raises:
        ValueError: they are damaged, contradict themselves or the config.
    """
    hidden, scored, vocabulary = config.hidden_size, config.draft_vocab_size or config.vocab_size, config.vocab_size
    query, keys = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    inner = config.intermediate_size
    ours: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * config.feature_size),
        "mask_slot.weight": (2 * hidden,),
        "layers.0.self_attn.q_proj.weight": (query, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": (keys, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": (keys, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, query),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (scored, hidden),
    }
    shapes = {theirs: ours.get(name, (hidden,)) for name, theirs in _NAMES.items()}
    shapes |= {"d2t": (scored,), "t2d": (vocabulary,)}
    mapped = ("d2t", "t2d") if scored == vocabulary else ()
    tensors = read_tensors(
        files,
        path,
        shapes,
        optional=mapped,
        ignored=("embed_tokens.weight", "hf_dart.norm.weight"),  # the latter written by hf_dart 0.1
        dtypes={"d2t": torch.int64, "t2d": torch.bool},
    )
    weights = {name: tensors[theirs] for name, theirs in _NAMES.items()}
    weights["mask_slot.weight"] = weights["mask_slot.weight"][None]
    if config.draft_vocab_size is not None:
        tokens, rows = draft_tokens(path, tensors["d2t"], tensors["t2d"], vocabulary)
        weights["draft_vocabulary"], weights["lm_head.weight"] = tokens, weights["lm_head.weight"][rows]
    elif "d2t" in tensors and bool(tensors["d2t"].any()):
        raise ValueError(f"The d2t of {path} moves tokens although the head scores all of them; fetch it again.")
    return weights


def read_fields(content: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The fields of a `DartConfig` that the config.json of such a head tells.

    What DART's code does not read, whatever it is, has no effect there, and none here.

    Args:
        content: of its config.json.
        num_layers: of the target; the file does not say which of them the head reads.

    Raises:
        ValueError: a field is missing or out of range, or the head cannot belong to a target of so many layers.
    """
    fields = Fields(content, _KIND)
    fields.choice("hidden_act", ("silu",), "silu")
    if "rope_scaling" in fields:
        raise fields.wrong("rope_scaling", fields.given("rope_scaling"), "left out; scaled rotations are not known")
    heads = fields.integer("num_attention_heads", 1, 4096)
    kv_heads = fields.integer("num_key_value_heads", 1, heads, heads)
    hidden = fields.integer("hidden_size", 2, 2**20)
    head_dim = fields.integer("head_dim", 2, 2**14, hidden // heads)
    dimension = fields.integer("target_hidden_size", 2, 2**20, hidden)
    vocab_size = fields.integer("vocab_size", 2, _MANY)
    scored = fields.integer("draft_vocab_size", 1, vocab_size)
    layers = default_feature_layers(num_layers)
    if len(layers) != 3:
        raise ValueError(
            "Heads in the format of DART's code read three different layers of their target, and this one is too "
            "small to have them; give the target that the head was made for."
        )
    return {
        "draft_length": fields.integer("draft_length", 0, 30) + 1,
        "feature_layers": layers,
        "hidden_size": hidden,
        "embedding_size": hidden,
        "feature_size": dimension,
        "own_lm_head": True,
        "double_norm": True,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.integer("intermediate_size", 1, 2**24),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_theta": fields.number("rope_theta", 10000.0),
        "vocab_size": vocab_size,
        "draft_vocab_size": None if scored == vocab_size else scored,
    }
