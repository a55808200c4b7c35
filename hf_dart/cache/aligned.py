"""`RightAlignedCache`: for layer kinds that have more per position than keys and values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from hf_dart.cache.base import EntryCache
from hf_dart.cache.stock_layers import (
    ENTRIES,
    DynamicIndexedLayer,
    StaticIndexedLayer,
    append,
    attention_layers,
    entries_of,
)


class _PastKeptLayer(DynamicSlidingWindowLayer):
    """A sliding layer that keeps what has left its window, and shows what its mask is made for."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        # Newer releases show no more than that themselves.
        shown = self.sliding_window - 1 + key_states.shape[2]
        return keys[:, :, -shown:], values[:, :, -shown:]


def _growing(layer: Any, slots: int) -> Any:
    """A layer that grows, with all entries that one of a cache of `slots` slots holds."""
    if isinstance(layer, StaticLayer):
        grown = DynamicIndexedLayer() if isinstance(layer, StaticIndexedLayer) else DynamicLayer()
        if layer.is_sliding:
            grown = _PastKeptLayer(layer.max_cache_len)
        append(grown, entries_of(layer))
        if layer.is_sliding:
            grown.cumulative_length = slots
        return grown
    if type(layer) is not DynamicSlidingWindowLayer:
        return copy.copy(layer)
    kept = _PastKeptLayer(layer.sliding_window)
    kept.__dict__.update(layer.__dict__)
    return kept


class RightAlignedCache(EntryCache):
    """A copy of a stock cache, of layers that grow.

    It is compacted after each round; rows that accept less gain left padding.
    """

    def __init__(self, prefilled: Cache, pads: list[int], keep: bool) -> None:
        super().__init__(prefilled, pads, keep)
        # Layers of its own; tensors of those that grow are shared until the first update makes new ones.
        self.cache = Cache(layers=[_growing(layer, self._prompt_slots) for layer in prefilled.layers])
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
        held = entries_of(own).items()
        append(layer, {name: states.narrow(ENTRIES[name][1], width - grown, grown) for name, states in held})

    def _widths(self) -> list[tuple[Any, int]]:
        """The layers and how many committed columns each holds; the nodes of a tree may follow them."""
        layers = attention_layers(self.cache)
        return [(layer, self._columns - gone) for layer, gone in zip(layers, self._out_of_window, strict=True)]

    def _keep(self, layer: Any, index: Tensor, columns: int) -> None:
        """Keep columns `index` [B, S] of a layer, the last of `columns` in all.

        A sliding layer keeps what has left its window, too: a row that is truncated may see it again.
        """
        for name, states in entries_of(layer).items():
            axes = ENTRIES[name]
            around = [index.shape[axes.index(axis)] if axis in axes else 1 for axis in range(states.ndim)]
            whole = [index.shape[1] if axis == axes[1] else size for axis, size in enumerate(states.shape)]
            setattr(layer, name, states.gather(axes[1], index.to(states.device).view(around).expand(whole)))
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = columns
