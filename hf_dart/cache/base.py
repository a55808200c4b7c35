"""What a round needs of the target's cache (`TreeCache`).

A round writes the N nodes of a tree after the committed entries of all rows and then keeps only the accepted path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from hf_dart.cache.stock_layers import DynamicIndexedLayer, attention_layers, undone_on_failure


class TreeCache(ABC):
    """What the round needs of a cache.

    Attributes:
        cache: goes into the target's forward as `past_key_values`.
        prompt_lengths: [B] entries per row after prefill, on the CPU.
        lengths: [B] committed entries per row (positions 0 .. lengths - 1), on the CPU.
    """

    cache: Cache
    prompt_lengths: Tensor
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
        """Drop the last entries of rows that are longer than `lengths` [B], or more of them (see `lengths` then)."""

    @abstractmethod
    def write_back(self, grown: int) -> None:
        """Lay the first `grown` entries after the prompt into the stock cache, in stock's slots; once only.

        Every row must have as many. Should it fail, the stock cache still holds the prompt.

        Raises:
            RuntimeError: a commit was broken off, and what it left cannot be read.
        """


class EntryCache(TreeCache):
    """A tree cache of keys and values, and of what else layers keep per position.

    Args:
        prefilled: the stock cache after prefill.
        pads: left padding per row.
        keep: the stock cache will be needed again (`write_back`); otherwise its memory may be freed.
    """

    def __init__(self, prefilled: Cache, pads: list[int], keep: bool) -> None:
        self._stock = prefilled
        self._keep_stock = keep
        self._written_back = False
        self._prompt_slots = int(prefilled.get_seq_length())
        self.prompt_lengths = torch.tensor([self._prompt_slots - pad for pad in pads])
        self.lengths = self.prompt_lengths

    def write_back(self, grown: int) -> None:
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
