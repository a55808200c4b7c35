"""The target's cache during tree decoding: where nodes are written, what they may see, what stays.

A round writes the N nodes of a tree behind the committed entries of all rows and then keeps only the
accepted path. `RaggedCache` holds the same position of all rows in the same slot, so that rows of different lengths
need no padding and a commit moves accepted entries only. `RightAlignedCache` does the same on a stock
`DynamicCache` for layer kinds that have further state per position.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from hf_dart.generation.buffers import LayerBuffers, pays
from hf_dart.generation.stock_layers import (
    SIMPLE_LAYERS,
    DynamicIndexedLayer,
    attention_layers,
    attention_places,
    held_by,
    undone_on_failure,
)
from hf_dart.slots import SlotSpec, SlotStore


class TreeCache(ABC):
    """What the round needs of a cache.

    Args:
        prefilled: the stock cache after prefill.
        pads: left padding per row.
        keep: the stock cache will be needed again (`write_back`); otherwise its memory may be freed.

    Attributes:
        cache: goes into the target's forward as `past_key_values`.
        prompt_lengths: [B] entries per row after prefill, on the CPU.
        lengths: [B] committed entries per row (positions 0 .. lengths - 1), on the CPU.
    """

    cache: Cache

    def __init__(self, prefilled: Cache, pads: list[int], keep: bool) -> None:
        self._stock = prefilled
        self._keep_stock = keep
        self._written_back = False
        self._prompt_slots = int(prefilled.get_seq_length())
        self.prompt_lengths = torch.tensor([self._prompt_slots - pad for pad in pads])
        self.lengths = self.prompt_lengths

    @abstractmethod
    def past_positions(self, layer: int, nodes: int) -> Tensor:
        """[B, S] position of each entry that layer `layer` shows before `nodes` new ones; -1 where hidden."""

    @abstractmethod
    def prepare(self, nodes: int) -> None:
        """Make room for `nodes` tree nodes per row."""

    @abstractmethod
    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Keep `counts[b]` entries of row b, those of nodes `path[b]` [B, A], and drop the other nodes."""

    @abstractmethod
    def truncate(self, lengths: Tensor) -> None:
        """Drop the last entries of rows that are longer than `lengths` [B]."""

    def write_back(self, grown: int) -> None:
        """Lay the first `grown` entries behind the prompt into the stock cache, in stock's slots; once only.

        Every row must have as many. Should it fail, the stock cache still holds the prompt.

        Raises:
            RuntimeError: a commit was broken off, and what it left cannot be read.
        """
        if self._written_back:
            return
        self.truncate(self.prompt_lengths + grown)
        with undone_on_failure(self._stock):
            if grown > 0:
                for index, layer in enumerate(attention_layers(self._stock)):
                    self._append(index, layer, grown)
            self._written_back = True

    @abstractmethod
    def _append(self, index: int, layer: Any, grown: int) -> None:
        """Append the last `grown` entries of every row to `layer`, the stock cache's `index`-th that keeps any."""

    def _release_stock(self) -> None:
        """Free what has been taken over, if nobody will look at it. Static layers may be used again by their maker."""
        if not self._keep_stock:
            for layer in attention_layers(self._stock):
                if isinstance(layer, DynamicLayer):
                    layer.keys = layer.values = torch.empty(0, dtype=layer.dtype, device=layer.device)
                if isinstance(layer, DynamicIndexedLayer):
                    layer.indexer_keys = None


def keeps_only_states(cache: Cache) -> bool:
    """Whether all layers keep keys and values and nothing else per position."""
    return all(type(layer) in SIMPLE_LAYERS for layer in attention_layers(cache))


def tree_cache(
    prefilled: Cache,
    pads: list[int],
    capacity: int,
    keep: bool,
    most: int | None = None,
    windows: Sequence[int | None] | None = None,
) -> TreeCache:
    """Take over a prefilled stock cache.

    Args:
        prefilled: the cache after prefill; all its entries belong to the prompt.
        pads: left padding per row.
        capacity: positions to make room for at first.
        keep: the stock cache will be needed again (`write_back`); otherwise its memory is freed.
        most: positions that the call will need at most, if that is known.
        windows: as for `RaggedCache`.
    """
    if keeps_only_states(prefilled):
        return RaggedCache(prefilled, pads, capacity, keep, most, windows)
    return RightAlignedCache(prefilled, pads, keep)


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
    def keys(self) -> Tensor:  # type: ignore[override]
        """[B, heads, S, head_dim] what is shown of them; some targets look whether there are any."""
        return self.buffers.held(2 * self.index, self.owner.longest)

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """As `keys`."""
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


class RaggedCache(TreeCache):
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
        if window is None or not pays(window, most):
            return None
        # What is given back to stock's other sliding layers is the whole text.
        ends_in_window = type(layer) is DynamicSlidingWindowLayer and not layer.record_past
        return window if ends_in_window or not self._keep_stock else None

    @property
    def store(self) -> SlotStore:
        """Where no layer has a window, the buffers of all."""
        (buffers,) = self._buffers.values()
        assert buffers.window is None
        return buffers.store

    def let_go(self) -> None:
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
        # Padding of the path is copied too, behind a row's last entry, where nothing is looked at; room for
        # it is there because the tree itself lay behind the longest row.
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


class RightAlignedCache(TreeCache):
    """A copy of a stock `DynamicCache`, compacted after each round; rows that accept less gain left padding."""

    def __init__(self, prefilled: Cache, pads: list[int], keep: bool) -> None:
        super().__init__(prefilled, pads, keep)
        # Layers of its own; their tensors are shared until the first update makes new ones.
        self.cache = Cache(layers=[copy.copy(layer) for layer in prefilled.layers])
        # Not before: a sliding layer would have kept the whole prompt.
        self.cache.activate_past_recording()
        self._columns = self._prompt_slots
        self._out_of_window = [self._columns - layer.keys.shape[2] for layer in attention_layers(self.cache)]
        self._readable = True
        self._release_stock()

    def past_positions(self, layer: int, nodes: int) -> Tensor:
        shown, offset = self.cache.layers[layer].get_mask_sizes(nodes)
        columns = torch.arange(offset, offset + shown - nodes)
        return (columns - (self._columns - self.lengths)[:, None]).clamp(min=-1)

    def prepare(self, nodes: int) -> None:
        """Layers grow as they are updated."""

    def commit(self, path: Tensor, counts: list[int]) -> None:
        added = max(counts)
        self._readable = False  # from here on some layers are ahead of the others
        for layer, past in self._widths():
            index = torch.zeros(len(counts), past + added, dtype=torch.long)
            for row, count in enumerate(counts):
                shift = added - count
                index[row, shift : shift + past] = torch.arange(past)
                index[row, shift + past :] = past + path[row, :count]
            self._keep(layer, index, self._columns + added)
        self._columns += added
        self.lengths = self.lengths + torch.tensor(counts)
        self._readable = True

    def truncate(self, lengths: Tensor) -> None:
        if not self._readable:
            raise RuntimeError("A commit was broken off; what it left cannot be read.")
        surplus = (self.lengths - lengths).clamp(min=0)
        if not surplus.any():
            return
        self._readable = False
        for layer, width in self._widths():
            self._keep(layer, (torch.arange(width) - surplus[:, None]).clamp(min=0), self._columns)
        self.lengths = self.lengths - surplus
        self._readable = True

    def _append(self, index: int, layer: Any, grown: int) -> None:
        own, width = self._widths()[index]
        new = slice(width - grown, width)
        layer.update(own.keys[:, :, new], own.values[:, :, new])
        if isinstance(own, DynamicIndexedLayer) and own.is_indexer_initialized:
            layer.update_indexer(own.indexer_keys[:, new])
            if getattr(own, "indexer_position_ids", None) is not None:  # newer releases
                held = (layer.indexer_position_ids, own.indexer_position_ids[..., new])
                layer.indexer_position_ids = torch.cat(held, dim=-1)

    def _widths(self) -> list[tuple[Any, int]]:
        """The layers and how many committed columns each holds; the nodes of a tree may follow them."""
        layers = attention_layers(self.cache)
        return [(layer, self._columns - gone) for layer, gone in zip(layers, self._out_of_window, strict=True)]

    def _keep(self, layer: Any, index: Tensor, columns: int) -> None:
        """Keep columns `index` [B, S] of a layer, the last of `columns` in all.

        A sliding layer keeps what has left its window, too: a row that is truncated may see it again.
        """
        index = index.to(layer.keys.device)
        for name in ("keys", "values"):
            states = getattr(layer, name)
            where = index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
            setattr(layer, name, states.gather(2, where))
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = columns
        if isinstance(layer, DynamicIndexedLayer) and layer.is_indexer_initialized:
            where = index[..., None].expand(-1, -1, layer.indexer_keys.shape[-1])
            layer.indexer_keys = layer.indexer_keys.gather(1, where)
            if getattr(layer, "indexer_position_ids", None) is not None:  # newer releases
                where = index[None].expand(layer.indexer_position_ids.shape[0], -1, -1)
                layer.indexer_position_ids = layer.indexer_position_ids.gather(2, where)
