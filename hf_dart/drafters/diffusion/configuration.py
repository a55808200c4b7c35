"""What a diffusion drafter is."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from transformers import PreTrainedConfig

from hf_dart.drafters.base_config import check_shape
from hf_dart.drafters.dart.configuration import DartConfig
from hf_dart.errors import check_types
from hf_dart.trees.config import checked_tree

UNMASKING = ("confidence", "left_to_right")


class DiffusionConfig(PreTrainedConfig):
    """The shape of a [`DiffusionDrafter`]; `DiffusionConfig.for_target` reads most of it off a target.

    Args:
        draft_length: γ, how many tokens a draft has at most.
        denoise_steps: T, reverse steps per draft; what `drafter.denoise_steps` starts as.
        unmasking: which tokens a reverse step reveals: those whose best choice is likeliest ("confidence"), or the
            first ("left_to_right"); what `drafter.unmasking` starts as.
        context_window: W, how many tokens back a position sees; at most the length of the rows trained on.
        hidden_size, num_layers, num_attention_heads, num_key_value_heads, head_dim, intermediate_size, rms_norm_eps,
            rope_theta: of the drafter's own transformer.
        share_embeddings: read and write tokens through the target's embeddings and LM head, which are then not
            stored; otherwise the drafter has its own table, and fits every target with that tokenizer.
        feature_layers: which of the target's `hidden_states` the context also carries; empty for none.
        embedding_size, lm_head_size, feature_size: widths of the target's embeddings, LM head and hidden states.
        tree: fields of the [`TreeConfig`] that suits this drafter best; what `drafter.tree_config` starts as.
        vocab_size, target_name, target_revision, target_model_type, target_num_layers, tokenizer_hash,
            chat_template_hash, enable_thinking: of the target that the drafter was made for, and what it was trained
            on, as in [`DartConfig`].

    Raises:
        ValueError: a field is out of range; the message names the field and what it takes.
    """

    model_type = "dart_diffusion"

    draft_length: int = 16
    denoise_steps: int = 1
    unmasking: str = "confidence"
    context_window: int = 256
    hidden_size: int = 256
    num_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    intermediate_size: int = 768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    share_embeddings: bool = True
    feature_layers: list[int] | tuple[int, ...] = ()
    embedding_size: int = 256
    lm_head_size: int = 256
    feature_size: int = 256
    tree: dict[str, Any] = field(default_factory=dict)
    initializer_range: float = 0.02
    vocab_size: int = 6144
    target_name: str | None = None
    target_revision: str | None = None
    target_model_type: str | None = None
    target_num_layers: int = 8
    tokenizer_hash: str | None = None
    chat_template_hash: str | None = None
    enable_thinking: bool | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_types(self, DiffusionConfig)
        self.feature_layers = sorted(set(self.feature_layers))
        check_shape(self)
        self.tree = checked_tree(self.tree)
        for name in ("denoise_steps", "num_layers", "lm_head_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more.")
        if self.unmasking not in UNMASKING:
            raise ValueError(f"unmasking is {self.unmasking!r}; give 'confidence' or 'left_to_right'.")
        if self.context_window <= self.draft_length:
            raise ValueError(
                f"context_window ({self.context_window}) must be larger than draft_length ({self.draft_length}), or "
                "the last slots would see no context."
            )

    @property
    def features_width(self) -> int:
        """F, the width of the concatenated features of one position."""
        return len(self.feature_layers) * self.feature_size

    @property
    def needs(self) -> dict[str, int]:
        """What a target has to have, in the words of `hf_dart.drafters.compatibility.check_compatible`."""
        needs: dict[str, int] = {}
        if self.share_embeddings:
            needs |= {"embedding width": self.embedding_size, "LM head width": self.lm_head_size}
        if self.feature_layers:
            needs |= {"hidden size": self.feature_size, "number of layers": self.target_num_layers}
        return needs

    @classmethod
    def for_target(cls, target: Any, **overrides: Any) -> DiffusionConfig:
        """Two layers as wide as those of `target` (a causal LM), without features; any field can be overridden.

        Raises:
            ValueError: the target has no token embeddings or no LM head to share.
        """
        shape = DartConfig.for_target(target)
        alike = (
            "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "rope_theta",
            "embedding_size", "feature_size", "vocab_size", "target_name", "target_revision", "target_model_type",
            "target_num_layers",
        )  # fmt: skip
        fields = {name: getattr(shape, name) for name in alike}
        fields |= {"hidden_size": shape.feature_size, "lm_head_size": shape.hidden_size}
        return cls(**{**fields, **overrides})
