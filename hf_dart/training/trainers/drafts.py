"""The drafts of a batch's blocks, and what the target says they should be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_dart.training.objective.blocks import labels_after, target_positions
from hf_dart.training.objective.losses import NO_LABEL
from hf_dart.trees.vocabulary import columns_of


class Goals(NamedTuple):
    """The target's distributions after some tokens of a batch, in a draft vocabulary of M tokens."""

    places: Tensor  # [U] those tokens, in ascending order, counted through the rows [B T]
    logits: Tensor  # [U, M]; M is V without a draft vocabulary
    others: Tensor | None = None  # [U] log-sum-exp over all tokens outside of it, where asked for and there are any
    best: Tensor | None = None  # [U] column of the likeliest token, M for one outside, where that was asked for

    @classmethod
    def joined(cls, parts: Sequence[Goals]) -> Goals:
        """Return the goals of several parts of a batch as one."""
        return cls._make(None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True))

    def at(self, places: Tensor) -> Tensor:
        """Return the logits [..., M] after tokens [...] that are all among `places`."""
        return self.logits[self._rows(places)]

    def everything_at(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [..., M], or [..., M + 1] with all others in the last column, and the best columns [...]."""
        assert self.best is not None
        rows, logits = self._rows(places), self.at(places)
        if self.others is not None:
            logits = torch.cat([logits, self.others[rows][..., None]], dim=-1)
        return logits, self.best[rows]

    def _rows(self, places: Tensor) -> Tensor:
        return torch.searchsorted(self.places, places.contiguous())


@dataclass(frozen=True)
class Drafts:
    """The N blocks of a batch, with what the drafter made of them and what it should have."""

    inputs: dict[str, Any]  # the batch, with what `DrafterTrainer.draw` has added
    hidden: Tensor  # [N, d, H] of the drafter
    goals: Goals  # what the target says after the tokens of `places`
    places: Tensor  # [N, d] the token of the batch, as in `goals`, after which each draft token comes
    labels: Tensor  # [N, d] the tokens that follow, `NO_LABEL` where none is known

    def of(self, chosen: Tensor) -> Drafts:
        """Select the blocks that `chosen` [N] (bool) names."""
        return replace(self, hidden=self.hidden[chosen], places=self.places[chosen], labels=self.labels[chosen])

    def split(self, size: int) -> Iterator[Drafts]:
        """Yield so many blocks at a time; 0 gives all at once."""
        parts = (one.split(size or max(len(one), 1)) for one in (self.hidden, self.places, self.labels))
        for hidden, places, labels in zip(*parts, strict=True):
            yield replace(self, hidden=hidden, places=places, labels=labels)


def places_and_labels(inputs: dict[str, Any], draft_length: int) -> tuple[Tensor, Tensor]:
    """`places` and `labels` [N, d] of the blocks of a batch, as `Drafts` has them."""
    ids, present = inputs["input_ids"], inputs["anchors"] >= 0
    rows = present.nonzero()[:, :1]
    positions = target_positions(inputs["anchors"][present], draft_length)
    labels = labels_after(ids, inputs["documents"], rows, positions, inputs.get("loss_mask"))
    return rows * ids.shape[1] + positions, labels


def as_columns(labels: Tensor, vocabulary: Tensor | None, outside: int = NO_LABEL) -> Tensor:
    """Return the columns of labels [...] in a draft vocabulary [M], or None for all tokens; `NO_LABEL` stays.

    A token `outside` of it is no label in training: the draft must fail there, and nothing after it can be accepted.
    """
    if vocabulary is None:
        return labels
    return torch.where(labels == NO_LABEL, NO_LABEL, columns_of(labels, vocabulary, outside))
