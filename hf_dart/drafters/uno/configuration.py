"""`UnoConfig`: what a LoRA is by which a target drafts for itself."""

from __future__ import annotations

from typing import Any, Self

from transformers import PreTrainedModel

from hf_dart.drafters.base_config import DrafterConfig


class UnoConfig(DrafterConfig):
    """The shape of a [`UnoDrafter`].

    Args:
        draft_length: d: the target's own next token, and d - 1 masked tokens after it.
        mask_token_id: the token whose embedding masked tokens have: one that no text contains, as
            `hf_dart.drafters.vocabulary.unused_token` finds it.
        rank: r of the LoRA.
        alpha: its scale times the rank; None is twice the rank.
        target_modules: what of the target's layers it stands on, by the last part of their names.

    The other fields are those of `hf_dart.drafters.base_config.DrafterConfig`, the layers' being the target's own.

    Raises:
        ValueError: a field is out of range.
    """

    model_type = "dart_uno"

    mask_token_id: int = 0
    rank: int = 32
    alpha: float | None = None
    target_modules: list[str] | tuple[str, ...] = ()
    feature_layers: list[int] | tuple[int, ...] = ()

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.target_modules = sorted(set(self.target_modules))
        if self.draft_length < 2:
            raise ValueError("draft_length is 1, of which nothing is drafted by the LoRA; give 2 or more.")
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; give 1 or more.")
        if self.alpha is not None and not 0 < self.alpha < float("inf"):
            raise ValueError(f"alpha is {self.alpha}; give a finite number above 0.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id}; give one of 0..{self.vocab_size - 1}.")
        if self.feature_layers:
            raise ValueError("feature_layers belong to drafters beside the target, and this one is it; leave it out.")

    @classmethod
    def for_target(cls, target: PreTrainedModel, **overrides: Any) -> Self:
        """Return the config for `target` (a causal LM); any field can be overridden.

        Raises:
            ValueError: the target has no token embeddings or no LM head.
        """
        return super().for_target(target, **{"feature_layers": (), **overrides})
