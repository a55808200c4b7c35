"""`HybridCache`: entries of attention and running states side by side, committed together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_dart.cache.base import TreeCache
from hf_dart.cache.ragged import RaggedCache
from hf_dart.cache.slots import SlotStore
from hf_dart.cache.states import RunningStates, StatefulCache, states_of
from hf_dart.cache.stock_layers import undone_on_failure


class NoEntries(TreeCache):
    """What there is of attention in a model that has none: lengths of rows, counted from the prompt on."""

    def __init__(self, prefilled: Cache, rows: int) -> None:
        self.cache = Cache(layers=list(prefilled.layers))
        self.lengths = self.prompt_lengths = torch.zeros(rows, dtype=torch.long)

    def past_positions(self, layer: int, nodes: int) -> Tensor:
        raise ValueError("No layer keeps entries.")

    def prepare(self, nodes: int) -> None:
        """Nothing is written."""

    def commit(self, path: Tensor, counts: list[int]) -> None:
        self.lengths = self.lengths + torch.tensor(counts)

    def truncate(self, lengths: Tensor) -> None:
        self.lengths = torch.minimum(self.lengths, lengths)

    def write_back(self, grown: int) -> None:
        """Nothing was taken over."""


class HybridCache(TreeCache):
    """Takes over a prefilled cache that keeps running states.

    A state cannot be shortened: a row that is truncated goes back to its prompt, in its attention layers too.

    Args:
        prefilled: the stock cache after prefill, whose states are not written to before `write_back`.
        attention: has taken over its keys and values.
    """

    def __init__(self, prefilled: Cache, attention: TreeCache) -> None:
        self._stock, self._attention = prefilled, attention
        self.states = RunningStates(states_of(prefilled))
        self.cache = StatefulCache(attention.cache.layers, prefilled, self.states)
        self.prompt_lengths = attention.prompt_lengths
        self._written_back = False
        self._whole = True

    @property
    def lengths(self) -> Tensor:  # type: ignore[override]
        """[B] committed tokens per row."""
        return self._attention.lengths

    @property
    def _entries(self) -> RaggedCache:
        assert isinstance(self._attention, RaggedCache)
        return self._attention

    @property
    def on_slots(self) -> bool:
        """Can the entries be handed over, as those of a `RaggedCache`?"""
        return isinstance(self._attention, RaggedCache)

    @property
    def store(self) -> SlotStore:
        """See `RaggedCache.store`."""
        return self._entries.store

    @property
    def longest(self) -> int:
        """Committed tokens of the longest row."""
        return self._entries.longest

    def release(self) -> None:
        """Free entries and states, which another cache holds until it hands them back (`take_in`)."""
        self._whole = False
        self._entries.release()
        self.states.committed = dict(self.states.prompt)

    def take_in(self, store: SlotStore, lengths: Tensor, rows: list[int], states: Mapping[Any, Tensor] | None) -> None:
        """See `RaggedCache.take_in`; `states` [R, ...] are those of the rows, None where a commit was broken off."""
        self._whole = False
        self._entries.take_in(store, lengths, rows)
        if states is not None:
            self.states.take_in(states, rows)
            self._whole = True

    def past_positions(self, layer: int, nodes: int) -> Tensor:
        return self._attention.past_positions(layer, nodes)

    def prepare(self, nodes: int) -> None:
        if not self._whole:
            raise RuntimeError("A commit was broken off; what it left cannot be gone on with.")
        self._attention.prepare(nodes)

    def commit(self, path: Tensor, counts: list[int]) -> None:
        self._whole = False  # from here on the states lack what the entries hold
        self._attention.commit(path, counts)
        self.states.commit(path, counts)
        self._whole = True

    def truncate(self, lengths: Tensor) -> None:
        too_long = self.lengths > lengths
        if too_long.any():
            self._whole = False
            self._attention.truncate(torch.where(too_long, self.prompt_lengths, self.lengths))
            self.states.back_to_prompt(too_long)
            self._whole = True

    def write_back(self, grown: int) -> None:
        """As every tree cache; but nothing, should some row have more or fewer: its state is not that of the others.

        The stock cache still holds the prompt then.
        """
        if not self._whole:
            raise RuntimeError("A commit was broken off; what it left cannot be read.")
        if self._written_back or bool((self.lengths != self.prompt_lengths + grown).any()):
            return
        with undone_on_failure(self._stock):
            self._attention.write_back(grown)
            for slot, state in states_of(self._stock).items():
                state.copy_(self.states.committed[slot])  # in place: captured graphs may read it there
            self._written_back = True
