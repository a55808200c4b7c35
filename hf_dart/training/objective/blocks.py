"""Prefix-shared masked blocks: many drafts of one sequence, trained in one pass (DART, section 3.2).

A row holds T tokens, i.e. T - 1 real positions (position i: features of token i, embedding of token i + 1), and after
them K blocks of M mask slots: d - 1, or d if logits are not shifted. The block of anchor n drafts what the head would
draft at inference after real position n: draft token t (1..d) is token n + 1 + t, and its target distribution is the
target's at position n + t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_dart.training.objective.losses import NO_LABEL


@dataclass(frozen=True)
class Blocks:
    """Positions and masks of blocks, which a drafter's `forward` takes in addition to features and embeddings.

    A mask is bool, True if a query attends to a key: [B, 1, queries, keys]. Keys are all S entries. A block's are those
    that `DartHead.propose` has: the anchor's real position (shifted logits), then d - 1 mask slots, or d of these.
    """

    anchors: Tensor  # [B, K] real position of each block; -1 is no block
    positions: Tensor  # [B, S] with S = T - 1 + K M, counted from the start of each document; M mask slots per block
    entries: Tensor  # [B, K d] of each block; those of absent blocks mean nothing
    sees: Callable[[Tensor], Tensor]  # the mask [B, 1, Q, keys] of some entries [B, Q]
    real: int  # T - 1

    def drafts(self, hidden: Tensor) -> Tensor:
        """Return the hidden states [B, K, d, H] of the blocks, of those of all entries [B, S, H]."""
        index = self.entries[..., None].expand(-1, -1, hidden.shape[-1])
        return hidden.gather(1, index).unflatten(1, (self.anchors.shape[1], -1))

    @property
    def mask(self) -> Tensor:
        """Mask of all entries [B, 1, S, keys]."""
        every = torch.arange(self.positions.shape[1], device=self.positions.device)
        return self.sees(every.expand_as(self.positions))

    def inputs(self, layers: int) -> dict[str, Tensor | None]:
        """Positions and masks for a `forward` of that many layers, which then returns the blocks' states alone."""
        mask, own = self.mask if layers > 1 else None, self.sees(self.entries)
        return {"positions": self.positions, "attention_mask": mask, "wanted": self.entries, "wanted_mask": own}


def document_positions(documents: Tensor) -> Tensor:
    """Positions [B, T] counted from the start of each document of `documents` [B, T]."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def draw_anchors(
    documents: Tensor,  # [B, T] document of each token, -1 for padding; a document is contiguous
    count: int,  # K
    draft_length: int,  # d
    generator: torch.Generator | None = None,
    loss_mask: Tensor | None = None,  # [B, T] bool, the tokens that the target would write itself; None is all
) -> Tensor:
    """`count` different anchors per row, uniform over those whose whole draft lies in one document.

    The first drafted token, n + 2, has to be one that the target would write; the draft may run past their end.

    Returns:
        [B, K] int64 in ascending order; -1 at the end of rows that have fewer than K possible anchors.
    """
    batch, length = documents.shape
    anchors = documents.new_full((batch, count), -1, dtype=torch.long)
    candidates = length - draft_length
    if candidates < 1:
        return anchors
    # Token n + d has to exist: the last target distribution is read there. Its successor need not.
    here, there = documents[:, :candidates], documents[:, draft_length:]
    possible = (here == there) & (here >= 0)
    if loss_mask is not None:
        possible &= F.pad(loss_mask[:, 2:], (0, 1), value=False)[:, :candidates]
        if draft_length == 1:  # else n + 2 is no later than n + d
            possible &= F.pad(documents[:, 2:], (0, 1), value=-1)[:, :candidates] == here
    keys = torch.rand(batch, candidates, generator=generator).to(documents.device)
    order = torch.where(possible, keys, 2.0).argsort(dim=1)[:, :count]
    chosen = torch.where(possible.gather(1, order), order, length).sort(dim=1).values
    anchors[:, : chosen.shape[1]] = torch.where(chosen < length, chosen, -1)
    return anchors


def build_blocks(
    documents: Tensor,
    anchors: Tensor,  # [B, K] of `draw_anchors`
    draft_length: int,
    bidirectional: bool = False,  # the slots of a block attend to each other in both directions
    window: int | None = None,  # how many positions back real ones are attended to, one's own included; None for all
    shifted: bool = True,  # the anchor's real position drafts the first token; else a block has d slots
) -> Blocks:
    """Positions and masks of the prefix-shared pass.

    Real positions attend causally inside their document. The slots of anchor n see the real positions of its
    document up to n, and the slots of their own block up to themselves, or all of them; nothing sees another
    block.
    """
    batch, count = anchors.shape
    slots, real = draft_length - int(shifted), documents.shape[1] - 1
    device = documents.device
    documents = documents[:, :real]
    at = anchors.clamp(min=0)

    places = document_positions(documents)
    offsets = torch.arange(slots, device=device)
    slot_places = places.gather(1, at)[..., None] + 1 + offsets  # [B, K, M]
    positions = torch.cat([places, slot_places.reshape(batch, -1)], dim=1)

    # Of every entry: its document, the last real position that it may see, its block (-1: it is real itself).
    entry_documents = torch.cat([documents, documents.gather(1, at).repeat_interleave(slots, dim=1)], dim=1)
    own = torch.arange(real, device=device).expand(batch, -1)
    last_seen = torch.cat([own, anchors.repeat_interleave(slots, dim=1)], dim=1)
    numbers = torch.arange(count, device=device).repeat_interleave(slots)
    block = torch.cat([numbers.new_full((real,), -1), numbers])
    slot_entries = torch.arange(real, real + count * slots, device=device).view(count, slots)
    of_block = [at[..., None]] * shifted + [slot_entries.expand(batch, -1, -1)]
    entries = torch.cat(of_block, dim=2).flatten(1)
    key = torch.arange(positions.shape[1], device=device)

    def sees(queries: Tensor) -> Tensor:
        def of(values: Tensor) -> Tensor:
            return values.gather(1, queries)[..., None]

        prefix = (key <= of(last_seen)) & (of(entry_documents) == entry_documents[:, None])
        if window is not None:
            prefix &= of(positions) - positions[:, None] < window
        own_block = block[queries][..., None] == block
        if not bidirectional:
            own_block &= key <= queries[..., None]
        return torch.where(block < 0, prefix, own_block)[:, None]

    return Blocks(anchors, positions, entries, sees, real)


def target_positions(anchors: Tensor, draft_length: int) -> Tensor:
    """[..., d] positions n + 1 .. n + d at which the target's logits are the goals of anchor n."""
    return anchors[..., None] + torch.arange(1, draft_length + 1, device=anchors.device)


def labels_after(
    ids: Tensor,  # [B, T], as `documents`
    documents: Tensor,
    rows: Tensor,  # [N, 1] of 0..B-1
    positions: Tensor,  # [N, d] of 0..T-1, as `target_positions` gives them
    loss_mask: Tensor | None = None,  # as for `draw_anchors`; from the first token outside on there are no labels
) -> Tensor:
    """Return the token after each position [N, d], `NO_LABEL` where its document ends there."""
    after = (positions + 1).clamp(max=ids.shape[1] - 1)
    inside = (after > positions) & (documents[rows, after] == documents[rows, positions])
    if loss_mask is not None:
        inside &= loss_mask[rows, after].cummin(-1).values
    return torch.where(inside, ids[rows, after], NO_LABEL)
