"""`SlotCache`: keys and values of rows of any length, position p of a row in slot p.

One cache for the target and for drafters, in eager and in captured rounds. What a round drafts is written after the
committed entries; a commit moves accepted entries alone, so that rows of different lengths need no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_dart.cache.slots import LayerBuffers, SlotSpec, SlotStore, spec_of


class SlotLayer(CacheLayerMixin):
    """One attention layer of a `SlotCache`, as a forward of transformers takes it.

    Args:
        owner: the cache.
        buffers: hold the layer's keys and values; None makes them of the first ones that are written.
        index: of the layer within the buffers.
    """

    is_compileable = False
    is_sliding = False

    def __init__(self, owner: SlotCache, buffers: LayerBuffers | None = None, index: int = 0) -> None:
        self.owner, self.index = owner, index
        self.buffers: Any = buffers
        self.is_initialized = True

    @property
    def keys(self) -> Tensor:
        """Keys [B, heads, S, head_dim] that are shown before new ones; some targets look whether there are any."""
        return self.buffers.shown_to(2 * self.index, self.owner.start)

    @property
    def values(self) -> Tensor:
        """Values [B, heads, S, head_dim], like `keys`."""
        return self.buffers.shown_to(2 * self.index + 1, self.owner.start)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Leave the layer without buffers: `update` makes them."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        owner = self.owner
        if self.buffers is None:
            self.buffers = owner.add([spec_of(key_states), spec_of(value_states)])
        keys = owner.write_next(self.buffers, 2 * self.index, key_states)
        return keys, owner.write_next(self.buffers, 2 * self.index + 1, value_states)

    def get_seq_length(self) -> int:
        return self.owner.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        shown = 0 if self.buffers is None else self.buffers.shown
        return self.owner.end - shown, shown

    def get_max_length(self) -> int:
        return -1


class SlotCache:
    """Keys and values of B rows, in buffers that several layers share.

    Args:
        lengths: [B] committed entries per row, on the device on which rounds count them.
        capacity: slots to make room for at first.
        most: slots that will be needed at most, if that is known.

    Attributes:
        cache: goes into a forward of transformers.
        lengths: [B] committed entries per row.
        counted: [B] the same on the host, so that the device need not be asked.
        fixed: shapes do not follow the text, for rounds that are compiled: every slot is shown.
        start: slot before which entries are committed, in the longest row; new ones of all rows are written from there.
        end: slots that are shown to new entries.
        places: [B, Q] slots of the new entries, where rows have places of their own; None writes them from `start` on.
    """

    def __init__(self, lengths: Tensor, capacity: int, most: int | None = None) -> None:
        self.lengths, self.counted = lengths, lengths.cpu()
        self.capacity, self.most = capacity, most
        self.fixed = False
        self.places: Tensor | None = None
        self._counts_on_host = True
        self.start = self.end = self.longest
        self.buffers: list[LayerBuffers] = []
        self.cache = Cache(layers=[])

    @classmethod
    def begin(cls, spec: SlotSpec, buffers: int, batch_size: int, capacity: int) -> Self:
        """Make an empty one with `buffers` buffers of one shape."""
        cache = cls(torch.zeros(batch_size, dtype=torch.long, device=spec.device), capacity)
        cache.add([spec] * buffers)
        return cache

    @classmethod
    def of_layers(cls, layers: int, batch_size: int, capacity: int) -> Self:
        """Make an empty one for modules of transformers, with buffers as their first keys and values need them."""
        cache = cls(torch.zeros(batch_size, dtype=torch.long), capacity)
        cache.cache = Cache(layers=[SlotLayer(cache) for _ in range(layers)])
        return cache

    def as_fixed(
        self,
        batch_size: int,
        capacity: int,
        device: torch.device,
        zeros: Callable[[str, tuple[int, ...], torch.dtype, torch.device], Tensor],
    ) -> Self:
        """Make an empty one with the same buffers on fixed shapes.

        Args:
            batch_size: B.
            capacity: slots of each row.
            device: on which rounds count entries.
            zeros: makes the storage (see `SlotStore`).
        """
        other = type(self)(torch.zeros(batch_size, dtype=torch.long, device=device), capacity)
        other.fixed = True
        other.buffers = [LayerBuffers(SlotStore(self.store.specs, batch_size, capacity, zeros=zeros))]
        other.end = capacity
        return other

    def add(self, specs: Sequence[SlotSpec], window: int | None = None) -> LayerBuffers:
        """Make buffers of these shapes, of layers that attend to `window` positions; None if all."""
        made = LayerBuffers.of(specs, self.counted, max(self.capacity, self.end), self.most, window)
        self.buffers.append(made)
        return made

    @property
    def specs(self) -> list[SlotSpec]:
        """Shapes of all buffers."""
        return [spec for buffers in self.buffers for spec in buffers.store.specs]

    @property
    def store(self) -> SlotStore:
        """The buffers of all layers, where none has a window."""
        (buffers,) = self.buffers
        assert buffers.window is None
        return buffers.store

    @property
    def ragged(self) -> bool:
        """True if one row may take fewer new entries than another."""
        return self.fixed or len(self.lengths) > 1

    @property
    def shortest(self) -> int:
        """Committed entries of the shortest row."""
        return int(self.counted.min())

    @property
    def longest(self) -> int:
        """Committed entries of the longest row."""
        return int(self.counted.max())

    def writable(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return True if all buffers take values of that device and dtype."""
        return all(buffers.store.writable(device, dtype) for buffers in self.buffers)

    # ---- writing ------------------------------------------------------------------------------------

    def prepare(self, entries: int) -> None:
        """Make room for that many new entries per row, which are written from `start` on."""
        if self.fixed:
            self.start = self.capacity - entries
            return
        self.start, self.end, self.places = self.longest, self.longest + entries, None
        for buffers in self.buffers:
            buffers.prepare(self.counted, self.longest, entries)

    def place(self, slots: Tensor, end: int) -> None:
        """Let the next forward write its entries at `slots` [B, Q] and attend to the first `end` slots."""
        self.places, self.end = slots, end
        for buffers in self.buffers:
            buffers.store.reserve(end)

    def reach(self, entries: int) -> int:
        """Make room for that many new entries per row, and return how many slots are looked at with them."""
        if not self.fixed:
            self.prepare(entries)
        return self.end

    def write(self, index: int, values: Tensor, positions: Tensor) -> Tensor:
        """Write new entries [B, heads, R, head_dim] at the first R of `positions` [B, Q]; return the whole buffer."""
        return self.store.write(index, values, positions[:, : values.shape[2]] if self.ragged else self.longest)

    def write_next(self, buffers: LayerBuffers, index: int, states: Tensor) -> Tensor:
        """Write the entries [B, heads, Q, head_dim] of a forward, and return all that are shown to them."""
        store = buffers.store
        if self.places is not None:
            store.write(index, states, self.places)
        else:
            store.write(index, states, self.start - buffers.first)
        return buffers.shown_to(index, self.end)

    # ---- committed entries --------------------------------------------------------------------------

    def past_positions(self, buffers: LayerBuffers) -> Tensor:
        """Position [B, S] of each entry that is shown before new ones; -1 where a row has none."""
        positions = torch.arange(buffers.shown, self.start, device=self.lengths.device)
        return torch.where(positions < self.lengths[:, None], positions, -1)

    def move(self, path: Tensor) -> None:
        """Move the entries of nodes `path` [B, A] after the committed ones.

        What follows a row's last accepted node moves too: nobody looks at it, and the next round overwrites it. There
        is room for it because the tree itself lies after the longest row.
        """
        path = path.to(self.lengths.device)
        source = self.start + path
        target = self.lengths[:, None] + torch.arange(path.shape[1], device=path.device)
        if not self.fixed and torch.equal(source, target):  # roots of rows of equal length are in place already
            return
        for buffers in self.buffers:
            buffers.store.move(source - buffers.first, target - buffers.first)

    def advance(self, counts: Tensor) -> None:
        """Count `counts` [B] more committed entries, which lie in their slots already."""
        if self._counts_on_host:
            self.counted = self.counted + counts.cpu()
        if self.fixed:  # captured graphs read these tensors by address
            self.lengths.add_(counts.to(self.lengths.device))
        else:
            self.lengths = self.lengths + counts.to(self.lengths.device)

    def set_lengths(self, lengths: Tensor) -> None:
        """Count `lengths` [B] committed entries; what lies after them is dropped."""
        self.counted, self.lengths = lengths.cpu(), lengths.to(self.lengths.device)

    def cut(self, lengths: Tensor) -> bool:
        """Drop what follows `lengths` [B]; change nothing and return False where a row has fewer entries."""
        if bool((self.counted < lengths.cpu()).any()):
            return False
        self.set_lengths(lengths)
        return True

    # ---- between calls and captured rounds ----------------------------------------------------------

    def ahead(self) -> Self:
        """Share the entries with another cache that counts for itself, for a draft that may yet be dropped."""
        other = copy(self)
        other.lengths, other._counts_on_host = self.lengths.clone(), False
        return other

    def load(self, other: SlotCache, rows: Sequence[int]) -> None:
        """Hold in place what another cache of the same layers does, row `rows[i]` of it in row i."""
        rows = list(rows)
        self.counted = other.counted[rows]
        self.store.clear_from(0)  # entries of an earlier call might be NaN
        self.store.copy_from(other.store, self.longest, [*enumerate(rows)])
        if self.fixed:
            self.lengths.copy_(self.counted)
        else:
            self.set_lengths(self.counted)

    def take_in(self, other: SlotCache, rows: Sequence[int]) -> None:
        """Hold what another cache of the same layers does, row i of it in this one's row `rows[i]`."""
        rows = list(rows)
        for row in rows:
            self.store.clear_row(row)
        counted = self.counted.clone()
        counted[rows] = other.counted
        self.set_lengths(counted)
        self.store.copy_from(other.store, other.longest, [(row, place) for place, row in enumerate(rows)])
        self.store.reserve(self.longest)

    def release(self) -> None:
        """Free all entries, which another cache holds until it hands them back (`take_in`)."""
        for buffers in self.buffers:
            buffers.store.release()
