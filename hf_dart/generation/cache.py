"""The target's cache during tree decoding: where nodes are written, what they may see, what stays.

A round writes the N nodes of a tree behind the committed entries of all rows and then keeps only the
accepted path. `RaggedCache` holds position p of a row in slot p, so that rows of different lengths need no
padding and a commit moves accepted entries only. `RightAlignedCache` does the same on a stock
`DynamicCache` for layer kinds that have further state per position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

try:  # layer kinds that older releases do not have
    from transformers.cache_utils import DummyLayer
except ImportError:  # pragma: no cover
    DummyLayer = type("DummyLayer", (), {})
try:
    from transformers.cache_utils import DynamicIndexedLayer
except ImportError:  # pragma: no cover
    DynamicIndexedLayer = type("DynamicIndexedLayer", (), {})

from hf_dart.slots import SlotSpec, SlotStore


class TreeCache(ABC):
    """What the round needs of a cache.

    Attributes:
        cache: goes into the target's forward as `past_key_values`.
        lengths: [B] committed entries per row (positions 0 .. lengths - 1), on the CPU.
    """

    cache: Cache
    lengths: Tensor

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

    @abstractmethod
    def write_back(self) -> None:
        """Lay the committed entries into the stock cache, in stock's slots.

        All rows must have grown by the same number of entries since prefill.
        """


def is_placeholder(layer: Any) -> bool:
    """Layers that keep nothing themselves (they read another layer's keys and values)."""
    return isinstance(layer, DummyLayer)


def tree_cache(prefilled: DynamicCache, pads: list[int], capacity: int, keep: bool) -> TreeCache:
    """Take over a prefilled stock cache.

    Args:
        prefilled: the cache after prefill; all its entries belong to the prompt.
        pads: left padding per row.
        capacity: positions to make room for at first.
        keep: the stock cache will be needed again (`write_back`); otherwise its memory is freed.
    """
    simple = all(
        is_placeholder(layer) or type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
        for layer in prefilled.layers
    )
    if simple:
        return RaggedCache(prefilled, pads, capacity, keep)
    return RightAlignedCache(prefilled, pads)


class _RaggedLayer(CacheLayerMixin):
    """One attention layer of a `RaggedCache`: a window on its buffers."""

    is_compileable = False
    is_sliding = False

    def __init__(self, owner: RaggedCache, index: int) -> None:
        super().__init__()
        self.owner = owner
        self.index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The buffers exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.owner.longest
        end = start + key_states.shape[2]
        keys = self.owner.store.write(2 * self.index, key_states, start)
        values = self.owner.store.write(2 * self.index + 1, value_states, start)
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.owner.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.longest + query_length, 0

    def get_max_length(self) -> int:
        return -1


class RaggedCache(TreeCache):
    """Static buffers in which position p of a row lies in slot p; tree nodes follow the longest row."""

    def __init__(self, prefilled: DynamicCache, pads: list[int], capacity: int, keep: bool) -> None:
        self._stock = prefilled
        total = prefilled.get_seq_length()
        self._prompt_lengths = [total - pad for pad in pads]
        self.lengths = torch.tensor(self._prompt_lengths)
        self.longest = max(self._prompt_lengths)
        attention = [layer for layer in prefilled.layers if not is_placeholder(layer)]
        specs = [
            SlotSpec(states.shape[1], states.shape[3], states.dtype, states.device)
            for layer in attention
            for states in (layer.keys, layer.values)
        ]
        self.store = SlotStore(specs, len(pads), max(capacity, self.longest))
        places: list[Any] = []
        for layer in prefilled.layers:
            places.append(layer if is_placeholder(layer) else _RaggedLayer(self, _count_ragged(places)))
        for index, layer in enumerate(attention):
            for part, states in enumerate((layer.keys, layer.values)):
                self._take_over(2 * index + part, states, pads, total)
            if not keep:
                layer.keys = layer.values = torch.empty(0, dtype=layer.dtype, device=layer.device)
        self.cache = Cache(layers=places)
        self._positions = torch.arange(self.store.capacity)

    def _take_over(self, index: int, states: Tensor, pads: list[int], total: int) -> None:
        """Copy a stock layer's entries, the last ones of `total`, to the slots of their positions."""
        buffer, kept = self.store.buffer(index), states.shape[2]
        for row, pad in enumerate(pads):
            first = max(total - kept, pad)
            buffer[row, :, first - pad : total - pad] = states[row, :, kept - (total - first) :]

    def past_positions(self, layer: int, nodes: int) -> Tensor:
        slots = self._positions[: self.longest]
        return torch.where(slots < self.lengths[:, None], slots, -1)

    def prepare(self, nodes: int) -> None:
        self.store.reserve(self.longest + nodes)
        if len(self._positions) < self.store.capacity:
            self._positions = torch.arange(self.store.capacity)

    def commit(self, path: Tensor, counts: list[int]) -> None:
        taken = torch.tensor(counts)
        source = self.longest + path
        target = self.lengths[:, None] + torch.arange(path.shape[1])
        # Padding of the path is copied too, behind a row's last entry, where nothing is looked at; room for
        # it is there because the tree itself lay behind the longest row.
        self.store.move(source, target)
        self.lengths = self.lengths + taken
        self.longest = int(self.lengths.max())

    def truncate(self, lengths: Tensor) -> None:
        self.lengths = torch.minimum(self.lengths, lengths)
        self.longest = int(self.lengths.max())

    def write_back(self) -> None:
        grown = self.lengths - torch.tensor(self._prompt_lengths)
        slots = torch.tensor(self._prompt_lengths)[:, None] + torch.arange(int(grown.max()))
        index = 0
        for layer in self._stock.layers:
            if is_placeholder(layer):
                continue
            new = []
            for buffer in (self.store.buffer(index), self.store.buffer(index + 1)):
                where = slots.to(buffer.device)[:, None, :, None]
                new.append(buffer.gather(2, where.expand(-1, buffer.shape[1], -1, buffer.shape[3])))
            layer.update(*new)
            index += 2


def _count_ragged(layers: list[Any]) -> int:
    return sum(isinstance(layer, _RaggedLayer) for layer in layers)


class RightAlignedCache(TreeCache):
    """A stock `DynamicCache`, compacted after each round; rows that accept less gain left padding."""

    def __init__(self, prefilled: DynamicCache, pads: list[int]) -> None:
        self.cache = prefilled
        self._columns = prefilled.get_seq_length()
        self._first_lengths = torch.tensor([self._columns - pad for pad in pads])
        self._first_columns = self._columns
        self.lengths = self._first_lengths
        self._nodes = 0
        # Not before: a sliding layer would have kept the whole prompt.
        prefilled.activate_past_recording()

    def past_positions(self, layer: int, nodes: int) -> Tensor:
        shown, offset = self.cache.layers[layer].get_mask_sizes(nodes)
        columns = torch.arange(offset, offset + shown - nodes)
        return (columns - (self._columns - self.lengths)[:, None]).clamp(min=-1)

    def prepare(self, nodes: int) -> None:
        self._nodes = nodes

    def commit(self, path: Tensor, counts: list[int]) -> None:
        added = max(counts)
        self._columns += added
        for layer in self._attention_layers():
            past = layer.keys.shape[2] - self._nodes
            index = torch.zeros(len(counts), past + added, dtype=torch.long)
            for row, count in enumerate(counts):
                shift = added - count
                index[row, shift : shift + past] = torch.arange(past)
                index[row, shift + past :] = past + path[row, :count]
            self._keep(layer, index.to(layer.keys.device))
        self.lengths = self.lengths + torch.tensor(counts)

    def truncate(self, lengths: Tensor) -> None:
        surplus = (self.lengths - lengths).clamp(min=0)
        self.lengths = self.lengths - surplus
        for layer in self._attention_layers():
            columns = torch.arange(layer.keys.shape[2]) - surplus[:, None]
            self._keep(layer, columns.clamp(min=0).to(layer.keys.device))

    def write_back(self) -> None:
        grown = int((self.lengths - self._first_lengths)[0])
        surplus = self._columns - self._first_columns - grown
        self._columns -= surplus
        self._nodes = 0
        for layer in self._attention_layers():
            columns = torch.arange(min(surplus, max(layer.keys.shape[2] - self._columns, 0)), layer.keys.shape[2])
            self._keep(layer, columns.expand(len(self.lengths), -1).to(layer.keys.device))
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.record_past = False

    def _attention_layers(self) -> list[Any]:
        return [layer for layer in self.cache.layers if not is_placeholder(layer)]

    def _keep(self, layer: Any, index: Tensor) -> None:
        """Keep columns `index` [B, S] of a layer; a sliding one then drops what has left its window."""
        for name in ("keys", "values"):
            states = getattr(layer, name)
            where = index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
            setattr(layer, name, states.gather(2, where))
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = self._columns
            if self._columns >= layer.sliding_window:
                layer.keys = layer.keys[:, :, 1 - layer.sliding_window :]
                layer.values = layer.values[:, :, 1 - layer.sliding_window :]
        if isinstance(layer, DynamicIndexedLayer) and layer.is_indexer_initialized:
            where = index[..., None].expand(-1, -1, layer.indexer_keys.shape[-1])
            layer.indexer_keys = layer.indexer_keys.gather(1, where)
            if getattr(layer, "indexer_position_ids", None) is not None:  # newer releases
                where = index[None].expand(layer.indexer_position_ids.shape[0], -1, -1)
                layer.indexer_position_ids = layer.indexer_position_ids.gather(2, where)
