"""`DFlashFile`: what our format keeps of a published DFlash drafter: its config.json as it was, and where it is from.

The weights lie beside it under the names of their own format, so that they are read by the same function.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hf_dart.drafters.base_config import DrafterConfig
from hf_dart.drafters.dflash.configuration import DFlashConfig
from hf_dart.interop.dflash import dflash_format


class DFlashFile(DrafterConfig):
    """The config.json that `DFlashDrafter.save_pretrained` writes.

    Args:
        published: the config.json that the drafter was published with.

    The other fields are those of `hf_dart.drafters.base_config.DrafterConfig`, told by that one and the target.

    Raises:
        ValueError: a field is out of range.
    """

    model_type = "dart_dflash"

    published: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def described(self) -> str:
        """The kind and format of the published drafter, in words."""
        return dflash_format(self.published) or ""

    @classmethod
    def of(cls, config: DFlashConfig, published: dict[str, Any], **known: Any) -> DFlashFile:
        """Of a drafter with this config; `known` are further fields."""
        shape = config.backbone
        vocabulary = {} if config.vocab_size is None else {"vocab_size": config.vocab_size}
        depth = config.num_target_layers or max(config.feature_layers)
        return cls(
            published=published,
            draft_length=max(1, config.block_size - int(not config.anchor_predicts)),
            feature_layers=list(config.feature_layers),
            **{name: getattr(shape, name) for name in _SHAPE},
            embedding_size=config.hidden_size,
            feature_size=config.hidden_size,
            **{"target_num_layers": depth, **vocabulary, **known},
        )


_SHAPE = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps")
