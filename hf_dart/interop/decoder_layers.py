"""Decoder layers as the config.json files of other projects describe them: widths, windows, rotary positions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_dart.interop.fields import MANY, Fields

_KINDS = ("full_attention", "sliding_attention")
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")}


def read_widths(layer: Fields, head_dim: int | None = None) -> dict[str, Any]:
    """Return the widths of a decoder layer by our names; a `head_dim` that is known better is not asked for."""
    heads = layer.integer("num_attention_heads", 1, 4096)
    kv_heads = layer.integer("num_key_value_heads", 1, heads, heads)
    hidden = layer.integer("hidden_size", 2, 2**20)
    layer.given("head_dim")
    if head_dim is None:
        head_dim = layer.integer("head_dim", 2, 2**14, hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"The config.json of this {layer.kind} has {heads} num_attention_heads of width {head_dim} and {kv_heads} "
            "num_key_value_heads; the first have to be a multiple of the last, and the width even."
        )
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": layer.integer("intermediate_size", 1, 2**24),
        "rms_norm_eps": layer.number("rms_norm_eps", 1e-6),
    }


def read_vocabulary(fields: Fields, layer: Fields) -> dict[str, Any]:
    """Return the size of the target's vocabulary and of the part of it that is scored, None for all of it."""
    vocab_size = layer.integer("vocab_size", 2, MANY)
    scored = fields.integer("draft_vocab_size", 1, vocab_size, vocab_size)
    return {"vocab_size": vocab_size, "draft_vocab_size": None if scored == vocab_size else scored}


def read_windows(layer: Fields, layers: int, *, by_depth: bool = False) -> list[int | None]:
    """Return the window of each layer, None where it attends to everything.

    Without `layer_types`, the upper layers have the window if `by_depth`, as in Qwen's configs; else none has.
    """
    window = layer.integer("sliding_window", 1, MANY) if "sliding_window" in layer else None
    if not layer.flag("use_sliding_window", not by_depth):
        window = None
    first = layer.integer("max_window_layers", 0, MANY, 28) if by_depth else layers
    kinds = layer.given("layer_types")
    if kinds is None:
        kinds = [_KINDS[window is not None and index >= first] for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) < layers or any(kind not in _KINDS for kind in kinds):
        raise layer.wrong("layer_types", kinds, f"a list of {layers} of {' and '.join(_KINDS)}")
    slides = [kind == "sliding_attention" for kind in kinds[:layers]]
    if any(slides) and window is None:
        raise layer.wrong("sliding_window with use_sliding_window", None, "a window, as layer_types has sliding ones")
    return [window if one else None for one in slides]


def read_rope(layer: Fields, *, theta: float | None = None, as_default: Collection[str] = ()) -> dict[str, Any]:
    """Return `rope_parameters` as transformers takes them; older files have `rope_theta` and `rope_scaling` instead.

    `theta` is the base where none is given, None if one has to be; kinds `as_default` are taken for "default".
    """
    scaling = layer.part("rope_scaling", "rope_parameters", outer=("rope_theta",))
    kind = scaling.given("rope_type", "type")
    if kind in as_default or ("mrope" in as_default and kind in (None, "default")):  # as Qwen3-VL calls it
        for name in ("factor", "mrope_section", "mrope_interleaved", "original_max_position_embeddings"):
            scaling.given(name)
        kind = None
    kind = "default" if kind is None else kind
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise scaling.wrong("rope_type", kind, " or ".join(_NEEDED))
    optional = [name for name in _OPTIONAL.get(kind, ()) if name in scaling]
    parameters: dict[str, Any] = {name: scaling.number(name) for name in (*_NEEDED[kind], *optional)}
    if "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] = scaling.integer("original_max_position_embeddings", 1, MANY)
    if "truncate" in scaling:
        parameters["truncate"] = scaling.flag("truncate")
    parameters["rope_theta"] = scaling.number("rope_theta", theta)
    scaling.finish()
    return {"rope_type": kind, **parameters}


def scaled_rotation(parameters: dict[str, Any], head_dim: int, max_positions: int) -> dict[str, Any]:
    """Return `rope_frequencies` [head_dim / 2] and `rope_scale` of a `HeadConfig`, as transformers makes them."""
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=max_positions, rope_parameters=dict(parameters))
    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(config)
    return {"rope_frequencies": rotary.inv_freq.tolist(), "rope_scale": float(rotary.attention_scaling)}
