"""`SlotCache`: keys and values of rows of any length, position p of a row in slot p.

What a round drafts is written after the committed entries; a commit moves accepted entries alone, so that rows of
different lengths need no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Self
from weakref import proxy

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_dart.trees.tree import MAX_DRAFT_LENGTH

SLACK = 2 * (MAX_DRAFT_LENGTH + 1)
"""Positions before a window that are kept: a call that breaks off drops the last tokens of a row."""
SPARE = 256
"""Positions that a store has room for beyond those it needs: so seldom are entries of a window moved to the front."""

Zeros = Callable[[str, tuple[int, ...], torch.dtype, torch.device], Tensor]


def outgrows(window: int, most: int | None) -> bool:
    """Return True if a text of `most` positions would outgrow a windowed store."""
    return most is None or most > window + SLACK + SPARE


class SlotStore:
    """Buffers of one shape, [B, heads, capacity, head_dim] each, in which position p of a row lies in slot p - `first`.

    They share one storage, so that a commit moves the entries of all layers at once. The capacity doubles when it is
    outgrown, up to `most` where that is known.

    Layers with a sliding `window` need the last positions of each row alone. What no row needs any more makes room for
    what comes; a row that has ended keeps what it saw, and with it all that follows.

    Attributes:
        shown: first position that queries are shown; masks hide more of them.
        lent: stock's layers that show entries of a buffer, by its index (`lend`).
    """

    def __init__(self, storage: Tensor, most: int | None = None, window: int | None = None, first: int = 0) -> None:
        self._most, self.window = most, window
        self.first = self.shown = first
        self.lent: dict[int, tuple[Any, str, slice]] = {}
        self._keep(storage)

    def _keep(self, storage: Tensor, rows: int | None = None) -> None:
        self._all_rows, self.storage = storage, storage if rows is None else storage[:, :rows]
        self._buffers = [self.storage[index] for index in range(len(storage))]

    @property
    def capacity(self) -> int:
        """Slots of each row."""
        return self.storage.shape[3]

    def shape_for(self, batch_size: int, capacity: int) -> tuple[int, ...]:
        """Shape of a storage for as many buffers of B rows."""
        buffers, _, heads, _, head_dim = self.storage.shape
        return buffers, batch_size, heads, capacity, head_dim

    def reserve(self, end: int) -> None:
        """Make room for positions up to end - 1, keeping what is there."""
        capacity, twice = end - self.first, 2 * self.capacity
        if capacity <= self.capacity:
            return
        capacity = max(capacity, twice if self._most is None else min(twice, self._most))
        grown = self.storage.new_zeros(self.shape_for(self.storage.shape[1], capacity))
        grown[..., : self.capacity, :] = self.storage
        self._keep(grown)
        for index, shown in self.lent.items():
            self.lend(index, *shown)

    def prepare(self, lengths: Tensor, entries: int) -> None:
        """Make room for so many entries after the longest of rows with `lengths` [B]."""
        longest, unseen = int(lengths.max()), unseen_by(lengths, self.window, SLACK)
        if longest + entries - self.first > self.capacity and unseen > self.first:
            gone, filled = unseen - self.first, longest - self.first
            self.storage[..., : filled - gone, :] = self.storage[..., gone:filled, :].clone()  # they may overlap
            self.first = unseen
        self.reserve(longest + entries)
        self.shown = max(unseen_by(lengths, self.window, 0), self.first)

    def resize(self, rows: int, longest: int) -> None:
        """Hold so many rows, of up to `longest` entries: the first ones, and others in the memory of dropped ones."""
        storage = self._all_rows
        if rows > storage.shape[1]:  # longer ones may have been dropped
            capacity = min(self.capacity, 2 * (longest - self.first) + SPARE)
            storage = storage.new_zeros(self.shape_for(rows, capacity))
            storage[:, : self.storage.shape[1]] = self.storage[..., :capacity, :]
        self._keep(storage, rows)

    def release(self) -> None:
        """Free the buffers, and what they hold; they grow again when room is asked for."""
        self.lent.clear()
        self._keep(self.storage.new_zeros(self.shape_for(self.storage.shape[1], 0)))

    def forget(self, row: int, first: int, gone: int, end: int, turned_back: Callable[[Tensor, int], Tensor]) -> None:
        """Drop `gone` entries of a row from position `first` on; keys, every other buffer, of the rest are turned."""
        left = self.storage[:, row, :, first + gone : end].clone()
        left[::2] = turned_back(left[::2], gone)
        self.storage[:, row, :, first : end - gone] = left

    # ---- entries ------------------------------------------------------------------------------------

    def lend(self, index: int, layer: Any, name: str, slots: slice) -> None:
        """Let a layer of stock's show slots of buffer `index` where they lie, as `name`, wherever the buffer moves."""
        self.lent[index] = layer, name, slots
        setattr(layer, name, self.buffer(index)[:, :, slots])

    def buffer(self, index: int) -> Tensor:
        """Buffer `index`, [B, heads, capacity, head_dim], a view."""
        if torch.is_grad_enabled():  # a view made without gradients cannot be written to with them
            return self.storage[index]
        return self._buffers[index]

    def shown_to(self, index: int, end: int) -> Tensor:
        """Entries [B, heads, S, head_dim] of a buffer that are shown to new ones, the last of which is before `end`."""
        return self.buffer(index).narrow(2, self.shown - self.first, end - self.shown)

    def write(self, index: int, values: Tensor, positions: Tensor | int) -> Tensor:
        """Write `values` [B, heads, Q, head_dim] and return the whole buffer.

        `positions` is the first of Q consecutive ones that all rows share, or, in stores without a window, [B, Q].
        """
        buffer = self.buffer(index)
        if values.dtype != buffer.dtype:  # under autocast, projections are of another
            values = values.to(buffer.dtype)
        if isinstance(positions, int):
            buffer.narrow(2, positions - self.first, values.shape[2]).copy_(values)
        else:
            rows = torch.arange(len(values), device=buffer.device)
            # Not scatter_, for which compiled code copies the whole buffer.
            buffer[rows[:, None], :, positions.to(buffer.device)] = values.transpose(1, 2)
        return buffer

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the entries at positions `source` [B, A] to positions `target` [B, A], in every buffer."""
        by_slot = self.storage.transpose(2, 3)  # [buffers, B, capacity, heads, head_dim]
        row = torch.arange(by_slot.shape[1], device=by_slot.device)[:, None]
        old, new = ((positions - self.first).to(by_slot.device) for positions in (source, target))
        by_slot[:, row, new] = by_slot[:, row, old]

    def take_rows(self, other: SlotStore, count: int, rows: Sequence[tuple[int, int]]) -> None:
        """Hold the first `count` entries of row `there` of a store of the same shape in row `here`, of each pair.

        The rest of the row is zeros: entries of an earlier call might be NaN, which masks do not hide.
        """
        self._most = self._most and other._most and max(self._most, other._most)  # a longer text goes on in it
        self.reserve(count)
        for here, there in rows:
            self.storage[:, here, :, count:] = 0
            self.storage[:, here, :, :count] = other.storage[:, there, :, :count]

    def take_over(self, index: int, states: Tensor, pads: list[int], slots: int) -> None:
        """Copy entries [B, heads, n, head_dim], the last of `slots` with `pads` on the left, to their positions.

        The rest of the buffer is zeros.
        """
        buffer, kept = self.buffer(index), states.shape[2]
        buffer[:, :, : max(slots - kept - min(pads) - self.first, 0)] = 0
        buffer[:, :, slots - max(pads) - self.first :] = 0
        for row, pad in enumerate(pads):
            start, end = max(slots - kept - pad, self.first), slots - pad
            buffer[row, :, start - self.first : end - self.first] = states[row, :, kept - (end - start) :]

    def read(self, index: int, starts: Tensor, count: int) -> Tensor:
        """Read `count` kept entries of each row, from positions `starts` [B] on: [B, heads, count, head_dim]."""
        buffer = self.buffer(index)
        slots = (starts - self.first)[:, None] + torch.arange(count)
        where = slots.to(buffer.device)[:, None, :, None]
        return buffer.gather(2, where.expand(-1, buffer.shape[1], -1, buffer.shape[3]))


def unseen_by(lengths: Tensor, window: int | None, slack: int) -> int:
    """Return the number of first positions that no row of `lengths` [B] will attend to again, less some `slack`."""
    return 0 if window is None else max(int(lengths.min()) - window - slack, 0)


class SlotLayer(CacheLayerMixin):
    """One attention layer of a `SlotCache`, as a forward of transformers takes it.

    `parts` are the store of its keys and their number in it, and those of its values; without, `update` makes stores.
    """

    is_compileable = False
    is_sliding = False

    def __init__(self, owner: SlotCache, parts: Sequence[tuple[SlotStore, int]] = ()) -> None:
        self.owner = owner
        self.parts = parts
        self.is_initialized = True

    @property
    def keys(self) -> Tensor:
        """Keys [B, heads, S, head_dim] that are shown before new ones; some targets look whether there are any."""
        store, index = self.parts[0]
        return store.shown_to(index, self.owner.start)

    @property
    def values(self) -> Tensor:
        """Values [B, heads, S, head_dim], like `keys`."""
        store, index = self.parts[1]
        return store.shown_to(index, self.owner.start)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Leave the layer without stores: `update` makes them."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.parts:
            self.parts = [(self.owner.add(states, 1), 0) for states in (key_states, value_states)]
        return self._write(0, key_states), self._write(1, value_states)

    def _write(self, part: int, states: Tensor) -> Tensor:
        """Write the keys or values [B, heads, Q, head_dim] of a forward, and return all that are shown to them."""
        owner, (store, index) = self.owner, self.parts[part]
        store.write(index, states, owner.start if owner.places is None else owner.places)
        return store.shown_to(index, owner.end)

    def get_seq_length(self) -> int:
        return self.owner.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        shown = self.parts[0][0].shown if self.parts else 0
        return self.owner.end - shown, shown

    def get_max_length(self) -> int:
        return -1


class SlotCache:
    """Keys and values of B rows, in stores that several layers share.

    Attributes:
        cache: goes into a forward of transformers.
        lengths: [B] committed entries per row, on the device on which rounds count them.
        counted: [B] the same on the host, so that the device need not be asked.
        fixed: shapes do not follow the text, for rounds that are compiled: every slot is shown.
        start: slot before which entries are committed, in the longest row; new ones of all rows are written from there.
        end: slots that are shown to new entries.
        places: [B, Q] slots of the new entries, where rows have places of their own; None writes them from `start` on.
        reader: the drafter (`TrainedDrafter`) whose window bounds the entries, if it has one (`forget`); what is left
            is counted as if it were all.
        dropped: [B] entries that were dropped for it, on the host.
    """

    def __init__(self, lengths: Tensor, capacity: int, most: int | None = None) -> None:
        self.lengths, self.counted = lengths, lengths.cpu()
        self.capacity, self.most = capacity, most
        self.fixed = False
        self.places: Tensor | None = None
        self.reader: Any = None
        self.dropped = torch.zeros_like(self.counted)
        self._counts_on_host = True
        self.start = self.end = self.longest
        self.stores: list[SlotStore] = []
        self.cache = Cache(layers=[])

    @classmethod
    def of_layers(cls, layers: int, batch_size: int, capacity: int) -> Self:
        """Make an empty one for modules of transformers, with stores as their first keys and values need them."""
        cache = cls(torch.zeros(batch_size, dtype=torch.long), capacity)
        # They refer to it weakly: held in a cycle, its buffers would outlive the call.
        cache.cache = Cache(layers=[SlotLayer(proxy(cache)) for _ in range(layers)])
        return cache

    def like(self, lengths: Tensor, capacity: int, zeros: Zeros | None = None) -> Self:
        """Make one with stores of the same shapes, without windows."""
        other = type(self)(lengths, capacity)
        other.reader = self.reader
        for number, store in enumerate(self.stores):
            assert store.window is None
            shape, like = store.shape_for(len(lengths), capacity), store.storage
            made = zeros(f"store {number}", shape, like.dtype, like.device) if zeros else like.new_zeros(shape)
            other.stores.append(SlotStore(made))
        return other

    def as_fixed(self, batch_size: int, capacity: int, device: torch.device, zeros: Zeros) -> Self:
        """Make an empty one of B rows on fixed shapes, which counts entries on `device`; see `like`."""
        other = self.like(torch.zeros(batch_size, dtype=torch.long, device=device), capacity, zeros)
        other.fixed, other.end = True, capacity
        return other

    def add(self, like: Tensor, buffers: int, window: int | None = None, filled: bool = False) -> SlotStore:
        """Make a store of buffers for entries `like` [B, heads, n, head_dim] of layers that attend to a `window`.

        Without one, to all positions. What will be `filled` (`take_over`) takes no memory of a CPU before.
        """
        capacity, first = max(self.capacity, self.end), unseen_by(self.counted, window, SLACK)
        if window is not None:
            capacity = min(capacity, max(self.longest - first, window + SLACK) + SPARE)
        shape = (buffers, len(self.counted), like.shape[1], capacity, like.shape[3])
        make = torch.empty if filled else torch.zeros
        storage = make(shape, dtype=like.dtype, device=like.device)
        self.stores.append(SlotStore(storage, self.most, window, first))
        return self.stores[-1]

    @property
    def store(self) -> SlotStore:
        """The buffers of all layers, where they are of one shape and without a window."""
        (store,) = self.stores
        assert store.window is None
        return store

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
        """Return True if all buffers take such values; those made in inference mode take none outside it."""
        return all(
            (storage.device, storage.dtype) == (device, dtype)
            and (torch.is_inference_mode_enabled() or not storage.is_inference())
            for storage in (store.storage for store in self.stores)
        )

    def bound(self, capacity: int) -> int:
        """Return the most entries of a row that are kept of so many."""
        reader = self.reader
        return capacity if reader is None or reader.draft_window is None else min(capacity, _most(reader))

    def forget(self, entries: int) -> None:
        """Drop what the reader's window leaves out, where that is full, before `entries` new ones of each row.

        Half a window is left, so that entries move seldom, and of rows that outgrow it alone.
        """
        reader = self.reader
        if reader is None or reader.draft_window is None:
            return
        left = reader.draft_sink + max(min(reader.draft_window // 2, reader.draft_window - entries), 0)
        gone = (self.counted - left).clamp(min=0) * (self.counted + entries > _most(reader))
        for row in gone.nonzero().flatten().tolist():
            for store in self.stores:
                store.forget(row, reader.draft_sink, int(gone[row]), int(self.counted[row]), reader.turned_back)
        self.dropped = self.dropped + gone
        self.set_lengths(self.counted - gone)

    # ---- writing ------------------------------------------------------------------------------------

    def prepare(self, entries: int) -> None:
        """Make room for that many new entries per row, which are written from `start` on."""
        if self.fixed:
            self.start = self.capacity - entries
            return
        self.start, self.end, self.places = self.longest, self.longest + entries, None
        for store in self.stores:
            store.prepare(self.counted, entries)

    def place(self, slots: Tensor, end: int) -> None:
        """Let the next forward write its entries at `slots` [B, Q] and attend to the first `end` slots."""
        self.places, self.end = slots, end
        for store in self.stores:
            store.reserve(end)

    def following(self, entries: int, most: int = 0) -> tuple[Tensor, Tensor | int, int]:
        """Make room for new entries after the committed ones of each row, `most` of them if that is more.

        Returned are positions [B, Q], the slots to write to or, where rows share them, the first, and the end of all.
        """
        if not self.fixed:
            self.forget(max(entries, most))
            self.prepare(max(entries, most))
        positions = self.lengths[:, None] + torch.arange(entries, device=self.lengths.device)
        return positions, positions if self.ragged else self.longest, self.end

    # ---- committed entries --------------------------------------------------------------------------

    def past_positions(self, store: SlotStore) -> Tensor:
        """Position [B, S] of each entry that is shown before new ones; -1 where a row has none."""
        positions = torch.arange(store.shown, self.start, device=self.lengths.device)
        return torch.where(positions < self.lengths[:, None], positions, -1)

    def move(self, path: Tensor) -> None:
        """Move the entries of nodes `path` [B, A] after the committed ones.

        What follows a row's last accepted node moves too: nobody looks at it, and the next round overwrites it. There
        is room for it because the tree itself lies after the longest row.
        """
        path = path.to(self.lengths.device)
        source = self.start + path
        target = self.lengths[:, None] + torch.arange(path.shape[1], device=path.device)
        if self.fixed or any(store.storage.device.type != "cpu" for store in self.stores):
            for store in self.stores:
                store.move(source, target)
            return
        # On a CPU a few small copies take less time than indices; in this order none overwrites what is yet to be read.
        for row, places in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
            for old, new in zip(*places, strict=True):
                if old != new:
                    for store in self.stores:
                        store.storage[:, row, :, new - store.first] = store.storage[:, row, :, old - store.first]

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
        self.counted = lengths.cpu()
        if self.fixed:
            self.lengths.copy_(lengths)
        else:
            self.lengths = lengths.to(self.lengths.device)

    def cut(self, lengths: Tensor) -> bool:
        """Drop what follows `lengths` [B]; change nothing and return False where a row has fewer entries."""
        lengths = lengths.cpu() - self.dropped
        first = 0 if self.reader is None else self.reader.draft_sink
        if bool(((self.counted < lengths) | (self.dropped > 0) & (lengths < first)).any()):
            return False
        self.set_lengths(lengths)
        return True

    # ---- between calls and captured rounds ----------------------------------------------------------

    def ahead(self) -> Self:
        """Share the entries with another cache that counts for itself, for a draft that may yet be dropped."""
        other = copy(self)
        other.lengths, other._counts_on_host = self.lengths.clone(), False
        return other

    def take_rows(self, other: SlotCache, rows: Sequence[tuple[int, int]]) -> None:
        """Hold row `there` of another cache of the same layers in row `here`, for each pair (here, there)."""
        here, there = (list(part) for part in zip(*rows, strict=True))
        counted, self.dropped = self.counted.clone(), self.dropped.clone()
        counted[here] = other.counted[there]
        self.dropped[here] = other.dropped[there]
        self.set_lengths(counted)
        for mine, theirs in zip(self.stores, other.stores, strict=True):
            mine.take_rows(theirs, int(other.counted[there].max()), rows)

    def resize(self, rows: int) -> None:
        """Hold so many rows: the first ones, and others of one entry each after them."""
        held = self.counted[:rows]
        self.set_lengths(torch.cat([held, held.new_ones(rows - len(held))]))
        self.dropped = torch.cat([self.dropped[:rows], held.new_zeros(rows - len(held))])
        for store in self.stores:
            store.resize(rows, self.longest)

    def release(self) -> None:
        """Free all entries, which another cache holds until it hands them back (`take_rows`)."""
        for store in self.stores:
            store.release()


def _most(reader: Any) -> int:
    """Return the most entries that a reader with a window attends to."""
    return reader.draft_sink + reader.draft_window
