"""What the configs of all drafters have in common."""

from __future__ import annotations

from typing import Any

from hf_dart.trees.tree import MAX_DRAFT_LENGTH

_SIZES = (
    "hidden_size", "embedding_size", "feature_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "target_num_layers",
)  # fmt: skip




def check_shape(config: Any) -> None:
    """Raise a `ValueError` if what the configs of drafters have in common is out of range; `feature_layers` ascend."""
    for name in _SIZES:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; give 1 or more.")
    if config.head_dim % 2:
        raise ValueError(f"head_dim is {config.head_dim}; give an even number, as rotary positions turn pairs.")
    for name in ("rms_norm_eps", "rope_theta"):
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} is {getattr(config, name)}; give a number above 0.")
    if config.initializer_range < 0:
        raise ValueError(f"initializer_range is {config.initializer_range}; give 0 or more.")
    if not 1 <= config.draft_length <= MAX_DRAFT_LENGTH:
        raise ValueError(f"draft_length is {config.draft_length}; give 1 to {MAX_DRAFT_LENGTH}.")
    layers, last = config.feature_layers, config.target_num_layers
    if layers and not 0 <= layers[0] <= layers[-1] <= last:
        raise ValueError(
            f"feature_layers {layers} do not lie in 0..{last}, the hidden_states of the target; count from 0 (the "
            "embeddings) and use no negative index."
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads ({config.num_attention_heads}) must be a multiple of num_key_value_heads "
            f"({config.num_key_value_heads})."
        )
