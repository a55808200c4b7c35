"""The drafts of a batch's blocks, and what the target says they should be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hf_dart.training.objective.blocks import labels_after, target_positions


@dataclass(frozen=True)
class Drafts:
    """The N blocks of a batch, with what the drafter made of them and what it should have.

    Attributes:
        inputs: the batch, with what `DrafterTrainer.draw` has added.
        hidden: [N, d, H] of the drafter.
        target_logits: [B T, V].
        goals: [N, d] the rows of `target_logits` that each draft token is to be like.
        labels: [N, d] the tokens that follow, `NO_LABEL` where none is known.
    """

    inputs: dict[str, Any]
    hidden: Tensor
    target_logits: Tensor
    goals: Tensor
    labels: Tensor

    def of(self, chosen: Tensor) -> Drafts:
        """Select the blocks that `chosen` [N] (bool) names."""
        return replace(self, hidden=self.hidden[chosen], goals=self.goals[chosen], labels=self.labels[chosen])

    def split(self, size: int) -> Iterator[Drafts]:
        """Yield so many blocks at a time; 0 gives all at once."""
        parts = (one.split(size or max(len(one), 1)) for one in (self.hidden, self.goals, self.labels))
        for hidden, goals, labels in zip(*parts, strict=True):
            yield replace(self, hidden=hidden, goals=goals, labels=labels)


def goals_and_labels(inputs: dict[str, Any], draft_length: int) -> tuple[Tensor, Tensor]:
    """`goals` and `labels` [N, d] of the blocks of a batch, as `Drafts` has them."""
    ids, present = inputs["input_ids"], inputs["anchors"] >= 0
    rows = present.nonzero()[:, :1]
    places = target_positions(inputs["anchors"][present], draft_length)
    labels = labels_after(ids, inputs["documents"], rows, places, inputs.get("loss_mask"))
    return rows * ids.shape[1] + places, labels
