"""Key and value buffers in which position p of a row lies in slot p, or those that a window still shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hf_dart.trees.tree import MAX_DRAFT_LENGTH

SLACK = 2 * (MAX_DRAFT_LENGTH + 1)
"""Positions before a window that are kept: a call that breaks off drops the last tokens of a row."""
SPARE = 256
"""Positions that a windowed buffer has room for beyond its window: so seldom are its entries moved to the front."""


def outgrows(window: int, most: int | None) -> bool:
    """Return True if a text of `most` positions would outgrow a windowed buffer."""
    return most is None or most > window + SLACK + SPARE


@dataclass(frozen=True)
class SlotSpec:
    """Shape of one buffer: [B, heads, capacity, head_dim] on `device`."""

    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def spec_of(states: Tensor) -> SlotSpec:
    """Shape of a buffer for entries [B, heads, n, head_dim] such as these."""
    return SlotSpec(states.shape[1], states.shape[3], states.dtype, states.device)


class SlotStore:
    """Buffers [B, heads, capacity, head_dim] that are written and compacted by slot.

    Buffers of one shape share one storage, so that a commit moves the entries of all layers at once.
    The capacity doubles when it is outgrown, up to `most` where that is known. Storage is what `zeros` gives, if it is
    given, for a name, a shape, a type and a device.
    """

    def __init__(
        self,
        specs: Sequence[SlotSpec],
        batch_size: int,
        capacity: int,
        most: int | None = None,
        zeros: Callable[[str, tuple[int, ...], torch.dtype, torch.device], Tensor] | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.capacity = capacity
        self._most, self._zeros = most, zeros
        counts: dict[SlotSpec, int] = {}
        self._place: list[tuple[SlotSpec, int]] = []
        for spec in specs:
            self._place.append((spec, counts.get(spec, 0)))
            counts[spec] = counts.get(spec, 0) + 1
        self._store({spec: self._allocate(spec, count) for spec, count in counts.items()})

    @property
    def specs(self) -> list[SlotSpec]:
        """Specs of all buffers."""
        return [spec for spec, _ in self._place]

    def _store(self, storage: dict[SlotSpec, Tensor]) -> None:
        """Keep the buffers in these tensors."""
        self._storage = storage
        self._buffers = [storage[spec][place] for spec, place in self._place]

    def _allocate(self, spec: SlotSpec, count: int) -> Tensor:
        shape = (count, self.batch_size, spec.heads, self.capacity, spec.head_dim)
        if self._zeros is not None:
            return self._zeros(f"{spec.heads} heads of {spec.head_dim}", shape, spec.dtype, spec.device)
        return torch.zeros(shape, dtype=spec.dtype, device=spec.device)

    def reserve(self, capacity: int) -> None:
        """Make room for slots 0..capacity-1, keeping what is there."""
        if capacity <= self.capacity:
            return
        old = self.capacity
        self.capacity = max(capacity, 2 * old if self._most is None else min(2 * old, self._most))
        grown = {spec: self._allocate(spec, len(storage)) for spec, storage in self._storage.items()}
        for spec, storage in self._storage.items():
            grown[spec][..., :old, :] = storage
        self._store(grown)

    def drop(self, count: int, filled: int) -> None:
        """Move what lies in slots count .. filled - 1 to the front."""
        for storage in self._storage.values():
            storage[..., : filled - count, :] = storage[..., count:filled, :].clone()  # they may overlap

    def release(self) -> None:
        """Free the buffers, and what they hold; they grow again when room is asked for."""
        self.capacity = 0
        self._store({spec: self._allocate(spec, len(storage)) for spec, storage in self._storage.items()})

    def writable(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return True if the buffers take values of that device and dtype.

        Buffers made in inference mode take none outside it.
        """
        return all(
            (spec.device, spec.dtype) == (device, dtype)
            and (torch.is_inference_mode_enabled() or not storage.is_inference())
            for spec, storage in self._storage.items()
        )

    def copy_from(self, other: SlotStore, slots: int, rows: Sequence[tuple[int, int]] | None = None) -> None:
        """Take over the first `slots` slots of a store of the same shapes; room is made for them.

        Args:
            rows: pairs of a row here and of the one there that goes into it; left out, all go into their own.
        """
        self.reserve(slots)
        for spec, storage in self._storage.items():
            source = other._storage[spec]
            if rows is None:
                storage[..., :slots, :] = source[..., :slots, :]
            for here, there in rows or ():
                storage[:, here, :, :slots] = source[:, there, :, :slots]

    def clear_from(self, slot: int) -> None:
        """Put zeros into all slots from `slot` on: masked ones count for nothing, but NaN times nothing is NaN."""
        for storage in self._storage.values():
            storage[..., slot:, :] = 0

    def clear_row(self, row: int) -> None:
        """Put zeros into all slots of a row, for the reason that `clear_from` gives."""
        for storage in self._storage.values():
            storage[:, row] = 0

    def buffer(self, index: int) -> Tensor:
        """Buffer `index`, [B, heads, capacity, head_dim], a view."""
        if torch.is_grad_enabled():  # a view made without gradients cannot be written to with them
            spec, place = self._place[index]
            return self._storage[spec][place]
        return self._buffers[index]

    def write(self, index: int, values: Tensor, slots: Tensor | int) -> Tensor:
        """Write `values` [B, heads, Q, head_dim] at `slots` and return the whole buffer.

        Args:
            slots: [B, Q] one slot per entry, or the first of Q consecutive slots that all rows share.
        """
        buffer = self.buffer(index)
        if values.dtype != buffer.dtype:  # under autocast, projections are of another
            values = values.to(buffer.dtype)
        if isinstance(slots, int):
            buffer.narrow(2, slots, values.shape[2]).copy_(values)
        else:
            rows = torch.arange(len(values), device=buffer.device)
            # Not scatter_, for which compiled code copies the whole buffer.
            buffer[rows[:, None], :, slots.to(buffer.device)] = values.transpose(1, 2)
        return buffer

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the entries in slots `source` [B, A] to slots `target` [B, A], in every buffer."""
        for storage in self._storage.values():
            by_slot = storage.transpose(2, 3)  # [buffers, B, capacity, heads, head_dim]
            row = torch.arange(self.batch_size, device=storage.device)[:, None]
            old, new = source.to(storage.device), target.to(storage.device)
            by_slot[:, row, new] = by_slot[:, row, old]


@dataclass
class LayerBuffers:
    """Buffers in which position p of a row lies in slot p - `first`.

    Layers with a sliding window need the last positions of each row alone. What no row needs any more makes room for
    what comes, so that such layers cost memory and time for their window, however long the text; a row that has ended
    keeps what it saw, and with it all that follows.

    Attributes:
        store: the buffers.
        window: how many positions a query attends to, its own included; None if all.
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
            window: how many positions a query attends to; None if all.
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
    """Return the number of first positions that no row will attend to again, less some `slack`."""
    return 0 if window is None else max(int(lengths.min()) - window - slack, 0)
