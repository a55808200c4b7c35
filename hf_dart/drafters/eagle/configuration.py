"""`EagleConfig`: what an EAGLE head is."""

from __future__ import annotations

from typing import Any

from hf_dart.drafters.dart.configuration import DartConfig
from hf_dart.errors import check_types

# What the config of a DART head has and this one has not.
_ABSENT = (
    "own_lm_head", "double_norm", "input_form", "copied_layer", "attention_bias", "output_bias", "qk_norm",
    "rope_frequencies", "inject_features", "mask_mode", "mask_token_id", "draft_vocab_size", "block_attention",
    "shift_logits", "selector_rank", "editor", "num_layers",
)  # fmt: skip


class EagleConfig(DartConfig):
    """The shape of an [`EagleDrafter`]: that of the paper's [`DartConfig`], without what is DART's own.

    Args:
        draft_length: d, passes of the layer per draft.
        beam: W, how many different tokens of each depth are drafted on from; 1 drafts a chain. What `drafter.beam`
            starts as.

    Raises:
        ValueError: a field is out of range, or belongs to DART heads.
    """

    model_type = "dart_eagle"

    beam: int = 4

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_types(self, EagleConfig)
        if self.beam < 1:
            raise ValueError(f"beam is {self.beam}; give 1 or more.")
        for name in _ABSENT:
            if getattr(self, name) != getattr(DartConfig, name):
                raise ValueError(f"{name} belongs to DART heads, and an EAGLE head has none; leave it out.")
