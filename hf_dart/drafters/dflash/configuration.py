"""`DFlashConfig`: a published DFlash drafter, or a variant of it."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from hf_dart.drafters.base_config import DrafterConfig
from hf_dart.interop.dflash import dflash_format, read_dflash
from hf_dart.trees.tree import MAX_DRAFT_LENGTH

_SHAPE = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps")


class DFlashConfig(DrafterConfig):
    """The config of a [`DFlashDrafter`]: the config.json that it was published with, and what is known of its target.

    Weights are in the same folder under the names of their own format, so that one function reads them.

    Args:
        published: the config.json that the drafter was published with.

    The other fields are those of `hf_dart.drafters.base_config.DrafterConfig`, told by that one and the target.
    """

    model_type = "dart_dflash"

    published: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def needs(self) -> dict[str, int]:
        widths = dict.fromkeys(("hidden size", "embedding width", "LM head width"), self.hidden_size)
        layers = read_dflash(self.published).num_target_layers
        return widths if layers is None else {**widths, "number of layers": layers}

    @property
    def options(self) -> dict[str, Any]:
        """The kind and format of the published drafter, in words."""
        return {"format": dflash_format(self.published)}

    @classmethod
    def of(cls, published: dict[str, Any]) -> Self:
        """Return the config of a published drafter, by its config.json."""
        config = read_dflash(published)
        shape = config.backbone
        return cls(
            published=published,
            draft_length=min(config.block_size - int(not config.anchor_predicts), MAX_DRAFT_LENGTH),
            feature_layers=list(config.feature_layers),
            **{name: getattr(shape, name) for name in _SHAPE},
            embedding_size=shape.hidden_size,
            feature_size=shape.hidden_size,
            vocab_size=config.vocab_size,
            draft_window=shape.max_position_embeddings,  # beyond which it was not trained
            target_num_layers=config.num_target_layers or max(config.feature_layers),
        )
