"""Rotary positions as the config.json files of other projects describe them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_dart.interop.fields import Fields, one_of

_MANY = 2**31 - 1
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")}


def read_rope(fields: Fields, *, theta: float | None = None, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """`rope_parameters` as transformers takes them; older files have `rope_theta` and `rope_scaling` instead.

    Args:
        fields: of the config.json.
        theta: the base where none is given; None if one has to be.
        more: further kinds that are taken for "default": "dynamic", which scales beyond the text it was trained on
            alone, "mrope", which has three positions, all alike in plain text.

    Raises:
        ValueError: the rotation is of a kind that is not known here, or a field of it is out of range.
    """
    new, old = fields.part("rope_parameters"), fields.part("rope_scaling")
    both = "rope_scaling" in fields and "rope_parameters" in fields
    if both and fields.given("rope_scaling") != fields.given("rope_parameters"):
        raise ValueError(
            f"The config.json of this {fields.kind} has both rope_scaling and rope_parameters; leave the older one out."
        )
    scaling = old if "rope_scaling" in fields else new
    if one_of(fields, scaling, ("rope_theta",)) is None and theta is None:
        raise fields.wrong("rope_theta", None, "a number above 0")
    kind = one_of(scaling, scaling, ("rope_type", "type"))
    kind = "default" if kind is None else kind
    if kind in more:
        for name in ("factor", "mrope_section", "mrope_interleaved", "original_max_position_embeddings"):
            scaling.given(name)
        kind = "default"
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise scaling.wrong("rope_type", kind, " or ".join(_NEEDED))
    optional = [name for name in _OPTIONAL.get(kind, ()) if name in scaling]
    parameters: dict[str, Any] = {name: scaling.number(name) for name in (*_NEEDED[kind], *optional)}
    if "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] = scaling.integer("original_max_position_embeddings", 1, _MANY)
    if "truncate" in scaling:
        parameters["truncate"] = scaling.flag("truncate")
    scaling.finish()
    numbers = fields if "rope_theta" in fields else scaling
    return {"rope_type": kind, "rope_theta": numbers.number("rope_theta", theta), **parameters}


def rope_frequencies(parameters: dict[str, Any], head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Frequencies [head_dim / 2] and the factor on cos and sin, as transformers makes them of `read_rope`'s fields."""
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=dict(parameters),
    )
    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq, float(rotary.attention_scaling)
