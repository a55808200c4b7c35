"""`EagleConfig`: what an EAGLE head is."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hf_dart.drafters.base_config import HeadConfig
from hf_dart.drafters.dart.configuration import DartConfig
from hf_dart.errors import check_fields


class EagleConfig(HeadConfig):
    """The shape of an [`EagleDrafter`]: decoder layers over a token and fused features.

    Args:
        draft_length: d, passes of the layers per draft.
        beam: W, how many different tokens of each depth are drafted on from; 1 drafts a chain. What `drafter.beam`
            starts as.
        num_layers: decoder layers; the first one attends over the pair of both, the others over its output.
        joined: the fusion takes a token's embedding together with the feature, instead of features of several layers;
            there are no norms in front of the first layer or after the last one (EAGLE-1 and EAGLE-2).
        norm_output: what stands in for the next feature is the output after the final norm, not before it (EAGLE-3.1).
        windows: as for all heads; a drafted entry attends to as many positions of the text as its last one.

    The other fields are those of `hf_dart.drafters.base_config.HeadConfig`.
    """

    model_type = "dart_eagle"
    changeable = (*HeadConfig.changeable, "beam")

    most_layers = 8

    beam: int = 4
    joined: bool = False
    norm_output: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        for name, default in _FORMER.items():
            if kwargs.pop(name, default) != default:
                raise ValueError(f"{name} belongs to DART heads, and an EAGLE head has none; leave it out.")
        super().__post_init__(**kwargs)
        check_fields(self, least={"beam": 1})
        normed = self.fusion_norm != "none" or self.norm_before_residual or self.norm_output
        if self.joined and (normed or self.features_width != self.hidden_size):
            raise ValueError(
                "joined reads one layer of the target, of the width hidden_size, and has no norms; leave out "
                "fusion_norm, norm_before_residual and norm_output, and name one layer in feature_layers."
            )


# Earlier versions wrote the fields of DART heads into config.json too, as DART heads have them by default.
_OWN = {one.name for one in fields(EagleConfig)}
_FORMER = {one.name: one.default for one in fields(DartConfig) if one.name not in _OWN} | {"inject_features": False}
EagleConfig.former_fields = tuple(_FORMER)
