"""Configuration of a diffusion drafter."""

from __future__ import annotations

from typing import Any, Self

from transformers import PreTrainedModel

from hf_dart.drafters.base_config import DrafterConfig
from hf_dart.errors import check_fields

UNMASKING = ("confidence", "left_to_right")


class DiffusionConfig(DrafterConfig):
    """The shape of a [`DiffusionDrafter`]; `DiffusionConfig.for_target` reads most of it off a target.

    Args:
        draft_length: γ, how many tokens a draft has at most.
        denoise_steps: T, reverse steps per draft; what `drafter.denoise_steps` starts as.
        unmasking: which tokens a reverse step reveals: those whose best choice is likeliest ("confidence"), or the
            first ("left_to_right"); what `drafter.unmasking` starts as.
        context_window: W, how many tokens back a position attends to; at most the length of the rows trained on.
        num_layers: decoder layers of the drafter's own transformer, whose width is `hidden_size`.
        share_embeddings: read and write tokens through the target's embeddings and LM head, which are then not
            stored; otherwise the drafter has its own table, and fits every target with that tokenizer.
        lm_head_size: width of the target's LM head.

    The other fields are those of `hf_dart.drafters.base_config.DrafterConfig`; without `feature_layers` the drafter
    reads tokens alone.
    """

    model_type = "dart_diffusion"
    changeable = (*DrafterConfig.changeable, "denoise_steps", "unmasking")

    draft_length: int = 16
    denoise_steps: int = 1
    unmasking: str = "confidence"
    context_window: int = 256
    num_layers: int = 2
    share_embeddings: bool = True
    feature_layers: list[int] | tuple[int, ...] = ()
    lm_head_size: int = 256

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        least = dict.fromkeys(("denoise_steps", "num_layers", "lm_head_size"), 1)
        check_fields(self, least=least, choices={"unmasking": UNMASKING})
        if self.context_window <= self.draft_length:
            raise ValueError(
                f"context_window ({self.context_window}) must be larger than draft_length ({self.draft_length}), or "
                "the last slots would see no context."
            )

    @property
    def needs(self) -> dict[str, int]:
        needs: dict[str, int] = {}
        if self.share_embeddings:
            needs |= {"embedding width": self.embedding_size, "LM head width": self.lm_head_size}
        if self.feature_layers:
            needs |= {"hidden size": self.feature_size, "number of layers": self.target_num_layers}
        return needs

    @classmethod
    def for_target(cls, target: PreTrainedModel, **overrides: Any) -> Self:
        """Make a config of two layers as wide as those of `target` (a causal LM), without features, plus overrides."""
        shape = DrafterConfig.for_target(target)
        fields = {"feature_layers": (), "hidden_size": shape.feature_size, "lm_head_size": shape.hidden_size}
        return super().for_target(target, **{**fields, **overrides})
