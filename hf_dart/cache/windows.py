"""Keys and values of some layers, by position: all of them, or those that a window still shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hf_dart.cache.slots import SlotSpec, SlotStore
from hf_dart.trees.tree import MAX_DRAFT_LENGTH

SLACK = 2 * (MAX_DRAFT_LENGTH + 1)
"""Positions before a window that are kept: a call that breaks off drops the last tokens of a row."""
SPARE = 256
"""Positions that a windowed buffer has room for beyond its window: so seldom are its entries moved to the front."""


def outgrows(window: int, most: int | None) -> bool:
    """Whether a text of `most` positions would outgrow a windowed buffer."""
    return most is None or most > window + SLACK + SPARE


@dataclass
class LayerBuffers:
    """Buffers in which position p of a row lies in slot p - `first`.

    Layers with a sliding window need the last positions of each row alone. What no row will see again makes room for
    what comes, so that such layers cost memory and time for their window, however long the text; a row that has ended
    keeps what it saw, and with it all that follows.

    Attributes:
        store: the buffers.
        window: how many positions a query sees, itself included; None if all.
        first: position in slot 0.
        shown: first position that queries are shown; masks hide more of them.
    """

    store: SlotStore
    window: int | None = None
    first: int = 0
    shown: int = 0

    @classmethod
    def of(
        cls, specs: Sequence[SlotSpec], lengths: Tensor, capacity: int, most: int | None, window: int | None = None
    ) -> Self:
        """Make empty ones.

        Args:
            specs: of all buffers.
            lengths: [B] committed positions per row.
            capacity: positions to make room for at first.
            most: positions that will be needed at most, if that is known.
            window: how many positions a query sees; None if all.
        """
        longest, first = int(lengths.max()), _unseen(lengths, window, SLACK)
        capacity = max(capacity, longest)
        if window is not None:
            capacity = min(capacity, max(longest - first, window + SLACK) + SPARE)
        return cls(SlotStore(specs, len(lengths), capacity, most), window, first, first)

    def prepare(self, lengths: Tensor, longest: int, entries: int) -> None:
        """Make room for so many entries after the longest of rows with `lengths` [B]."""
        end, unseen = longest + entries, _unseen(lengths, self.window, SLACK)
        if end - self.first > self.store.capacity and unseen > self.first:
            self.store.drop(unseen - self.first, longest - self.first)
            self.first = unseen
        self.store.reserve(end - self.first)
        self.shown = max(_unseen(lengths, self.window, 0), self.first)

    def shown_to(self, index: int, end: int) -> Tensor:
        """Entries [B, heads, S, head_dim] of a buffer that are shown to new ones, the last of which is before `end`."""
        return self.store.buffer(index)[:, :, self.shown - self.first : end - self.first]

    def take_over(self, index: int, states: Tensor, pads: list[int], slots: int) -> None:
        """Copy entries [B, heads, n, head_dim], the last n of `slots` slots, to their positions.

        Args:
            pads: left padding per row.
        """
        buffer, kept = self.store.buffer(index), states.shape[2]
        for row, pad in enumerate(pads):
            start, end = max(slots - kept - pad, self.first), slots - pad
            buffer[row, :, start - self.first : end - self.first] = states[row, :, kept - (end - start) :]

    def read(self, index: int, starts: Tensor, count: int) -> Tensor:
        """Read `count` entries of each row from positions `starts` [B] on: [B, heads, count, head_dim].

        Raises:
            RuntimeError: some have made room for others.
        """
        if int(starts.min()) < self.first:
            raise RuntimeError("The window has left those positions.")
        buffer = self.store.buffer(index)
        slots = (starts - self.first)[:, None] + torch.arange(count)
        where = slots.to(buffer.device)[:, None, :, None]
        return buffer.gather(2, where.expand(-1, buffer.shape[1], -1, buffer.shape[3]))


def _unseen(lengths: Tensor, window: int | None, slack: int) -> int:
    """How many positions no row will see again, with some `slack`."""
    return 0 if window is None else max(int(lengths.min()) - window - slack, 0)
