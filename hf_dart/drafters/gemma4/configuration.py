"""`Gemma4Config`: a published assistant of Gemma 4."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from transformers import PreTrainedModel

from hf_dart.drafters.base_config import DrafterConfig, told_of
from hf_dart.interop.gemma4 import read_assistant


class Gemma4Config(DrafterConfig):
    """The config of a [`Gemma4Drafter`]: the config.json that it was published with, and what is known of its target.

    Args:
        published: the config.json that the assistant was published with.

    The other fields are those of `hf_dart.drafters.base_config.DrafterConfig`, told by that one and the target.
    """

    model_type = "dart_gemma4"

    published: dict[str, Any] = dataclasses.field(default_factory=dict)
    draft_length: int = 4

    def check_window(self, window: int | None, sink: int) -> None:
        super().check_window(window, sink)
        if window is not None:
            raise ValueError("An assistant of Gemma 4 attends to its target's own text; leave draft_window out.")

    @property
    def needs(self) -> dict[str, int]:
        return {name: size for name, size in super().needs.items() if name != "LM head width"}

    @classmethod
    def of(cls, published: dict[str, Any], target: PreTrainedModel) -> Self:
        """Return the config of an assistant, by its config.json, for a target of Gemma 4."""
        config, last, told = read_assistant(published), last_layers(target), told_of(target)
        text = config.text_config
        widths = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps")
        if not last.keys() >= {*text.layer_types}:
            raise ValueError(
                f"An assistant of Gemma 4 drafts for a Gemma 4 with its kinds of layers, and {type(target).__name__} "
                "is none; give the target that it was published for."
            )
        return cls(
            published=published,
            feature_layers=[*(last[kind] for kind in dict.fromkeys(text.layer_types)), told["target_num_layers"]],
            hidden_size=text.hidden_size,
            **{name: getattr(text.per_layer_config[0], name) for name in widths},  # full layers may have others
            embedding_size=config.backbone_hidden_size,
            feature_size=config.backbone_hidden_size,
            vocab_size=text.vocab_size,
            **told,
        )


def last_layers(target: PreTrainedModel) -> dict[str, int]:
    """Return the last layer of each kind that has keys and values of its own; none of other models than Gemma 4."""
    text = target.config.get_text_config(decoder=True)
    if not text.model_type.startswith("gemma4"):
        return {}
    shared = getattr(text, "num_kv_shared_layers", 0)
    return {kind: index for index, kind in enumerate(text.layer_types[: len(text.layer_types) - shared])}
