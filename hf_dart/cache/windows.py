"""Keys and values of some layers of the target, by position: all of them, or those that a window still shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dart.cache.slots import SlotSpec, SlotStore
from hf_dart.trees.tree import MAX_DRAFT_LENGTH

SLACK = 2 * (MAX_DRAFT_LENGTH + 1)
"""Positions in front of a window that are kept: a call that breaks off drops the last tokens of a row."""
SPARE = 256
"""Positions that a windowed buffer has room for beyond its window: so seldom are its entries moved to the front."""


def outgrows(window: int, most: int | None) -> bool:
    """Would a text of `most` positions outgrow a windowed buffer?"""
    return most is None or most > window + SLACK + SPARE


class LayerBuffers:
    """Buffers in which position p of a row lies in slot p - `first`.

    Layers with a sliding window need the last positions of each row alone. What no row will see again makes room for
    what comes, so that such layers cost memory and time for their window, however long the text; a row that has ended
    keeps what it saw, and with it all that follows.

    Args:
        specs: of all buffers.
        lengths: [B] committed positions per row.
        capacity: positions to make room for at first.
        most: positions that will be needed at most, if that is known.
        window: how many positions a query sees, itself included; None if all.

    Attributes:
        first: position in slot 0.
        shown: first position that queries are shown; masks hide more of them.
    """

    def __init__(
        self, specs: Sequence[SlotSpec], lengths: Tensor, capacity: int, most: int | None, window: int | None = None
    ) -> None:
        self.window = window
        self.first = self.shown = self._unseen(lengths, SLACK)
        longest = int(lengths.max())
        capacity = max(capacity, longest)
        if window is not None:
            capacity = min(capacity, max(longest - self.first, window + SLACK) + SPARE)
        self.store = SlotStore(specs, len(lengths), capacity, most)

    def _unseen(self, lengths: Tensor, slack: int) -> int:
        """How many positions no row will see again, with some `slack`."""
        return 0 if self.window is None else max(int(lengths.min()) - self.window - slack, 0)

    def prepare(self, lengths: Tensor, longest: int, nodes: int) -> None:
        """Make room for `nodes` entries after the longest row."""
        end, unseen = longest + nodes, self._unseen(lengths, SLACK)
        if end - self.first > self.store.capacity and unseen > self.first:
            self.store.drop(unseen - self.first, longest - self.first)
            self.first = unseen
        self.store.reserve(end - self.first)
        self.shown = max(self._unseen(lengths, 0), self.first)

    def write(self, index: int, states: Tensor, start: int) -> Tensor:
        """Write entries [B, heads, Q, head_dim] at position `start` of all rows; what they see, up to the last."""
        slot, shown = start - self.first, self.shown - self.first
        return self.store.write(index, states, slot).narrow(2, shown, slot + states.shape[2] - shown)

    def held(self, index: int, longest: int) -> Tensor:
        """Entries [B, heads, S, head_dim] that are shown in front of new ones."""
        return self.store.buffer(index)[:, :, self.shown - self.first : longest - self.first]

    def past_positions(self, lengths: Tensor, longest: int) -> Tensor:
        """[B, S] position of each entry that is shown in front of new ones; -1 where a row has none."""
        positions = torch.arange(self.shown, longest)
        return torch.where(positions < lengths[:, None], positions, -1)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the entries at positions `source` [B, A] to positions `target` [B, A]."""
        self.store.move(source - self.first, target - self.first)

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
        """`count` entries of each row from positions `starts` [B] on: [B, heads, count, head_dim].

        Raises:
            RuntimeError: some have made room for others.
        """
        if int(starts.min()) < self.first:
            raise RuntimeError("The window has left those positions.")
        buffer = self.store.buffer(index)
        slots = (starts - self.first)[:, None] + torch.arange(count)
        where = slots.to(buffer.device)[:, None, :, None]
        return buffer.gather(2, where.expand(-1, buffer.shape[1], -1, buffer.shape[3]))
