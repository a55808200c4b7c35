"""The attention implementation that a target was set to."""

from __future__ import annotations

from transformers import PreTrainedModel

PACKED = "hf_dart_packed"
"""The name of the attention of captured rounds (`hf_dart.engine.attention`), which a config has while one runs."""


def attention_of(target: PreTrainedModel) -> str:
    """The attention implementation of `target`, "sdpa" for example, also while a captured round replaces it."""
    name = target.config.get_text_config(decoder=True)._attn_implementation
    return "sdpa" if name == PACKED else name
