"""`EagleTrainer`: an EAGLE head, trained as it drafts (training-time test, EAGLE-3, arXiv 2503.01840)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_dart.drafters.eagle.drafter import EagleDrafter
from hf_dart.training.objective.drafting import eagle_states
from hf_dart.training.options import option
from hf_dart.training.trainers.arguments import DrafterArguments, DrafterTrainingArguments
from hf_dart.training.trainers.drafts import Goals
from hf_dart.training.trainers.trainer import DrafterTrainer


@dataclass
class EagleArguments(DrafterArguments):
    """Options of a new [`EagleDrafter`], in addition to those of every drafter."""

    beam: int | None = option(None, "W, tokens of each depth from which drafting continues")
    draft_vocab_size: int | None = option(None, "draft only so many tokens, the most frequent of the training rows")


@dataclass
class EagleTrainingArguments(DrafterTrainingArguments):
    """`DrafterTrainingArguments` with EAGLE's decay: each further draft token counts 0.8 of the one before."""

    gamma: float | None = option(0.8, "exponential weights: that of a draft token relative to the one before")


class EagleTrainer(DrafterTrainer[EagleDrafter]):
    """Trainer of an [`EagleDrafter`]: the blocks, losses and data of a DART head, d - 1 passes of its layer per block.

    Arguments and errors are those of [`DrafterTrainer`].
    """

    drafter_class = EagleDrafter
    drafter_arguments = (EagleArguments,)
    training_arguments = EagleTrainingArguments
    takes_images = True

    def block_states(self, model: nn.Module, inputs: dict[str, Any], features: Tensor, goals: Goals) -> Tensor:
        return eagle_states(self.drafter, model, inputs, features, self.next_embeddings(inputs))
