"""`EagleConfig`: what an EAGLE head is."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hf_dart.drafters.base_config import DrafterConfig
from hf_dart.drafters.dart.configuration import DartConfig

_BASE = {one.name for one in fields(DrafterConfig)}
# Earlier versions wrote the fields of DART heads into config.json too, as DART heads have them by default.
_FORMER = {one.name: one.default for one in fields(DartConfig) if one.name not in _BASE}


class EagleConfig(DrafterConfig):
    """The shape of an [`EagleDrafter`]: one decoder layer over a token and fused features.

    Args:
        draft_length: d, passes of the layer per draft.
        beam: W, how many different tokens of each depth are drafted on from; 1 drafts a chain. What `drafter.beam`
            starts as.

    The other fields are those of `hf_dart.drafters.base_config.DrafterConfig`.

    Raises:
        ValueError: a field is out of range, or belongs to DART heads.
    """

    model_type = "dart_eagle"
    changeable = (*DrafterConfig.changeable, "beam")
    former_fields = tuple(_FORMER)

    beam: int = 4

    def __post_init__(self, **kwargs: Any) -> None:
        for name, default in _FORMER.items():
            if kwargs.pop(name, default) != default:
                raise ValueError(f"{name} belongs to DART heads, and an EAGLE head has none; leave it out.")
        super().__post_init__(**kwargs)
        if self.beam < 1:
            raise ValueError(f"beam is {self.beam}; give 1 or more.")
        if not self.feature_layers:
            raise ValueError("feature_layers is empty; name at least one index of the target's hidden_states.")
