"""`RaggedCache`: the same position of all rows in the same slot, whatever their lengths.

Rows of different lengths need no padding, and a commit moves accepted entries only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from hf_dart.cache.base import EntryCache
from hf_dart.cache.slots import SlotSpec, SlotStore
from hf_dart.cache.stock_layers import attention_layers, attention_places, held_by
from hf_dart.cache.windows import LayerBuffers, outgrows


class _RaggedLayer(CacheLayerMixin):
    """One attention layer of a `RaggedCache`: a window on its buffers."""

    is_compileable = False
    is_sliding = False

    def __init__(self, owner: RaggedCache, buffers: LayerBuffers, index: int) -> None:
        self.owner = owner
        self.buffers = buffers
        self.index = index
        self.is_initialized = True

    @property
    def keys(self) -> Tensor:
        """[B, heads, S, head_dim] what is shown of them; some targets look whether there are any."""
        return self.buffers.held(2 * self.index, self.owner.longest)

    @property
    def values(self) -> Tensor:
        """[B, heads, S, head_dim] likewise."""
        return self.buffers.held(2 * self.index + 1, self.owner.longest)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The buffers exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.owner.longest
        keys = self.buffers.write(2 * self.index, key_states, start)
        return keys, self.buffers.write(2 * self.index + 1, value_states, start)

    def get_seq_length(self) -> int:
        return self.owner.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.longest - self.buffers.shown + query_length, self.buffers.shown

    def get_max_length(self) -> int:
        return -1


class RaggedCache(EntryCache):
    """Buffers in which rows of different lengths need no padding; tree nodes follow the longest row.

    Args:
        windows: how many positions the queries of each attention layer see, as far as that need not be all.
    """

    def __init__(
        self,
        prefilled: Cache,
        pads: list[int],
        capacity: int,
        keep: bool,
        most: int | None = None,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        super().__init__(prefilled, pads, keep)
        self.longest = max(self.lengths.tolist())
        layers = attention_layers(prefilled)
        self._buffers: dict[int | None, LayerBuffers] = {}
        seen = [self._window(*part, most) for part in zip(layers, windows or [None] * len(layers), strict=True)]
        for window in dict.fromkeys(seen):
            held = [held_by(layer) for layer, its in zip(layers, seen, strict=True) if its == window]
            specs = [
                SlotSpec(states.shape[1], states.shape[3], states.dtype, states.device)
                for layer in held
                for states in layer
            ]
            buffers = self._buffers[window] = LayerBuffers(specs, self.lengths, capacity, most, window)
            for index, states in enumerate(states for layer in held for states in layer):
                buffers.take_over(index, states, pads, self._prompt_slots)
        slots = list(prefilled.layers)
        for order, (place, its) in enumerate(zip(attention_places(prefilled), seen, strict=True)):
            slots[place] = _RaggedLayer(self, self._buffers[its], seen[:order].count(its))
        self.cache = Cache(layers=slots)
        self._release_stock()

    def _window(self, layer: Any, window: int | None, most: int | None) -> int | None:
        """The `window` of a layer, if it is worth a buffer of its own, and what lies in front is never needed."""
        if window is None or not outgrows(window, most):
            return None
        # What is given back to stock's other sliding layers is the whole text.
        ends_in_window = isinstance(layer, DynamicSlidingWindowLayer) and not layer.record_past
        return window if ends_in_window or not self._keep_stock else None

    @property
    def store(self) -> SlotStore:
        """Where no layer has a window, the buffers of all."""
        (buffers,) = self._buffers.values()
        assert buffers.window is None
        return buffers.store

    def release(self) -> None:
        """Free all entries, which another store holds until it hands them back (`take_in`)."""
        self.store.release()

    def take_in(self, store: SlotStore, lengths: Tensor, rows: list[int] | None = None) -> None:
        """Hold what another store of the same shapes has in slots 0 .. lengths[b] - 1 of each row.

        Args:
            lengths: [B], or of the other store's rows.
            rows: which rows here those are; all where left out. What others held is gone.
        """
        rows = list(range(len(self.lengths))) if rows is None else rows
        merged = self.lengths.clone()
        merged[rows] = lengths.cpu()
        self.lengths, self.longest = merged, int(merged.max())
        self.store.reserve(self.longest)
        self.store.copy_from(store, int(merged[rows].max()), list(zip(rows, range(len(rows)), strict=True)))

    def past_positions(self, layer: int, nodes: int) -> Tensor:
        buffers: LayerBuffers = self.cache.layers[layer].buffers
        return buffers.past_positions(self.lengths, self.longest)

    def prepare(self, nodes: int) -> None:
        for buffers in self._buffers.values():
            buffers.prepare(self.lengths, self.longest, nodes)

    def commit(self, path: Tensor, counts: list[int]) -> None:
        source = self.longest + path
        target = self.lengths[:, None] + torch.arange(path.shape[1])
        # Padding of the path is copied too, after a row's last entry, where nothing is looked at; room for
        # it is there because the tree itself lay after the longest row.
        if not torch.equal(source, target):  # roots alone of rows of one length lie where they belong
            for buffers in self._buffers.values():
                buffers.move(source, target)
        self.lengths = self.lengths + torch.tensor(counts)
        self.longest = int(self.lengths.max())

    def truncate(self, lengths: Tensor) -> None:
        self.lengths = torch.minimum(self.lengths, lengths)
        self.longest = int(self.lengths.max())

    def _append(self, index: int, layer: Any, grown: int) -> None:
        own = attention_layers(self.cache)[index]
        window = own.buffers.window
        count = grown if window is None else min(grown, window)
        starts = self.prompt_lengths + grown - count
        layer.update(*(own.buffers.read(2 * own.index + part, starts, count) for part in range(2)))
        if count < grown:
            layer.cumulative_length += grown - count  # of which it would have kept nothing
