"""`EagleTrainer`: an EAGLE head, trained as it drafts (training-time test, EAGLE-3, arXiv 2503.01840)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hf_dart.drafters.eagle.drafter import EagleDrafter
from hf_dart.training.objective.blocks import build_blocks, target_positions
from hf_dart.training.trainers.arguments import DartTrainingArguments, DrafterArguments
from hf_dart.training.trainers.dart import DartTrainer


@dataclass
class EagleArguments(DrafterArguments):
    """An [`EagleDrafter`]."""

    beam: int | None = field(default=None, metadata={"help": "W, tokens of each depth that are drafted on from"})


@dataclass
class EagleTrainingArguments(DartTrainingArguments):
    """`DartTrainingArguments` with EAGLE's decay: each further draft token counts 0.8 of the one before."""

    gamma: float | None = field(
        default=0.8, metadata={"help": "exponential weights: that of a draft token relative to the one before"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selector_only:
            raise ValueError("selector_only trains a DartHead's selector; an EAGLE head has none.")


class EagleTrainer(DartTrainer):
    """Trains an [`EagleDrafter`]: the blocks, losses and data of a DART head, d - 1 passes of its layer per block.

    Args:
        drafter: as `EagleDrafter.from_target(target)` or `from_pretrained(..., target=target)` gives it.
        target, args, kwargs: as for [`DartTrainer`].

    Raises:
        ValueError: the drafter does not fit the target.
    """

    drafter_arguments = (EagleArguments,)
    training_arguments = EagleTrainingArguments
    head: EagleDrafter

    def block_states(self, model: nn.Module, inputs: dict[str, Any], features: Tensor, target_logits: Tensor) -> Tensor:
        ids, anchors = inputs["input_ids"], inputs["anchors"]
        blocks = build_blocks(inputs["documents"], anchors, self.head.draft_length)
        embeddings = self.head.embed(ids[:, 1:])
        # Pass j after anchor n reads the token n + 1 + j, j = 1..d - 1, which is the embedding at n + j.
        places = target_positions(anchors.clamp(min=0), self.head.draft_length)[..., :-1]
        flat = places.flatten(1)[..., None].expand(-1, -1, embeddings.shape[-1])
        return model(
            features=features[:, :-1],
            next_embeddings=embeddings,
            drafted_embeddings=embeddings.gather(1, flat).unflatten(1, places.shape[1:]),
            anchors=anchors,
            positions=blocks.positions,
            attention_mask=blocks.mask,
        )
