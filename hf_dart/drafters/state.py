"""The state of a drafter with attention: keys and values of what is verified, in slots."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hf_dart.cache.slots import SlotSpec, SlotStore
from hf_dart.drafters.base import Drafter
from hf_dart.drafters.proposal import Verified


@dataclass
class SlotState:
    """The draft cache of one call: keys and values of what is verified, position p of a row in slot p.

    What is drafted is written after them and overwritten by the next round.

    Attributes:
        store: the buffers.
        lengths: [B] positions taken in, on the device of the buffers.
        counted: [B] the same on the host, so that the device need not be asked.
    """

    store: SlotStore
    lengths: Tensor
    counted: Tensor

    @classmethod
    def begin(cls, spec: SlotSpec, buffers: int, batch_size: int, capacity: int) -> Self:
        """An empty one, of so many buffers."""
        none = torch.zeros(batch_size, dtype=torch.long)
        return cls(SlotStore([spec] * buffers, batch_size, capacity), none.to(spec.device), none)

    @property
    def ragged(self) -> bool:
        """May new entries of one row be fewer than those of another?"""
        return len(self.lengths) > 1

    @property
    def shortest(self) -> int:
        return int(self.counted.min())

    @property
    def longest(self) -> int:
        return int(self.counted.max())

    def reach(self, entries: int) -> int:
        """How many slots are looked at with so many new entries per row; room is made for them."""
        end = self.longest + entries
        self.store.reserve(end)
        return end

    def write(self, index: int, values: Tensor, positions: Tensor) -> Tensor:
        """Write new entries [B, heads, R, head_dim], at the first R of `positions` [B, Q]; the whole buffer."""
        return self.store.write(index, values, positions[:, : values.shape[2]] if self.ragged else self.longest)

    def advance(self, counts: Tensor) -> None:
        """Take in `counts` [B] more positions, which are written already."""
        self.counted = self.counted + counts.cpu()
        self.lengths = self.lengths + counts.to(self.lengths.device)

    def take_in(self, other: SlotState, rows: list[int]) -> None:
        """Hold what another state of the same shapes does, in its row i of this one's row `rows[i]`."""
        counted = self.counted.clone()
        counted[rows] = other.lengths.cpu()
        self.counted, self.lengths = counted, counted.to(self.lengths.device)
        self.store.copy_from(other.store, int(counted[rows].max()), list(zip(rows, range(len(rows)), strict=True)))

    def cut(self, lengths: Tensor) -> bool:
        """Drop what follows `lengths` [B]; False, and nothing is changed, where there is less than that."""
        lengths = lengths.cpu()
        if bool((self.counted < lengths).any()):
            return False
        self.counted, self.lengths = lengths, lengths.to(self.lengths.device)
        return True


class SlotDrafter(Drafter[SlotState]):
    """A drafter that keeps its keys and values in a `SlotState`, and can go on with that of an earlier call."""

    @property
    @abstractmethod
    def slot_spec(self) -> SlotSpec:
        """Heads, width, dtype and device of the buffers of keys and values that `begin` makes."""

    def resume(self, state: SlotState, pending: list[Verified], lengths: Tensor) -> bool:
        spec = self.slot_spec
        if not state.store.writable(spec.device, spec.dtype):
            return False
        for verified in pending:
            self.extend(state, *verified)
        return state.cut(lengths)
