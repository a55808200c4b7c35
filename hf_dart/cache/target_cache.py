"""`TargetCache`: the target's cache in a call, taken over from stock's after the prompt and given back at the end.

A round writes the N nodes of a tree after the committed entries of all rows and then keeps only the accepted path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_dart.cache.slot_cache import SlotCache, SlotLayer, SlotStore, Zeros, outgrows
from hf_dart.cache.states import FixedStates, RunningStates, StatefulCache, states_of
from hf_dart.cache.stock_layers import (
    attention_layers,
    attention_places,
    held_by,
    keeps_entries,
    keeps_states,
    slots_of,
    undone_on_failure,
    window_of,
)


class TargetCache:
    """Entries of attention in slots, and running states, committed together.

    A running state cannot be shortened: a row that is truncated goes back to its prompt, in its attention layers too.

    Attributes:
        cache: goes into the target's forward.
        prompt_lengths: [B] entries per row after prefill, on the CPU.
    """

    def __init__(
        self,
        prefilled: Cache,  # stock's, after prefill; all its entries belong to the prompt
        pads: list[int],  # left padding per row
        capacity: int,  # positions to make room for at first
        keep: bool,  # the stock cache will be needed again (`write_back`); otherwise its memory is freed
        most: int | None = None,  # positions that will be needed at most, if that is known
        windows: Sequence[int | None] | None = None,  # `layer_windows`; as far as queries need not attend to all
        lend: bool = False,  # the stock cache shows its entries where they lie in this one; they have no padding
    ) -> None:
        self.stock, self._keep_stock, self._lends = prefilled, keep, lend
        self._whole, self._written_back = True, False
        # Running states alone do not tell how much text they cover: then count tokens from the prompt on.
        attends = any(map(keeps_entries, prefilled.layers))
        self._prompt_slots = slots_of(prefilled)
        self.prompt_lengths = torch.tensor([self._prompt_slots - pad if attends else 0 for pad in pads])
        self.entries = SlotCache(self.prompt_lengths, capacity, most)
        layers = self._take_over(pads, windows) if attends else list(prefilled.layers)
        self.states: Any = None
        self.cache: Any = Cache(layers=layers)
        if any(map(keeps_states, prefilled.layers)):
            self.states = RunningStates(states_of(prefilled))
            self.cache = StatefulCache(layers, prefilled, self.states)

    def _take_over(self, pads: list[int], windows: Sequence[int | None] | None) -> list[Any]:
        """Move the prompt's entries, layer by layer, and return the layers that show them.

        Layers share a store, so that a commit moves the entries of all at once, unless each is to be freed by itself.
        """
        stock = attention_layers(self.stock)
        # Heads, their width, dtype and device; a window; the layer, if it has buffers of its own.
        kinds = [
            (states.shape[1::2], states.dtype, states.device, self._window(layer, window), order * self._lends)
            for order, (layer, window) in enumerate(zip(stock, windows or [None] * len(stock), strict=True))
            for states in held_by(layer)
        ]
        stores: dict[Any, SlotStore] = {}
        layers = list(self.stock.layers)
        for order, place in enumerate(attention_places(self.stock)):
            layer, own = stock[order], []
            for number, states in enumerate(held_by(layer), 2 * order):
                kind = kinds[number]
                if kind not in stores:
                    stores[kind] = self.entries.add(states, kinds.count(kind), kind[3], filled=True)
                own.append((stores[kind], kinds[:number].count(kind)))
                stores[kind].take_over(own[-1][1], states, pads, self._prompt_slots)
            layers[place] = SlotLayer(self.entries, own)
            if isinstance(layer, DynamicLayer):  # static ones may be reused by their owner
                if self._lends and own[0][0].window is None:
                    self._lend(layer, own, self._prompt_slots)
                elif not self._keep_stock:
                    layer.keys = layer.values = layer.keys.new_empty(0)
        return layers

    def _lend(self, layer: Any, own: Sequence[tuple[SlotStore, int]], slots: int) -> None:
        """Let a layer of the stock cache show what it keeps of the first `slots` where that lies in `own` buffers."""
        first, window = self._prompt_slots - layer.keys.shape[2], window_of(layer)
        if window is not None and not layer.record_past:
            first = max(first, slots - window + 1)
        for name, (store, index) in zip(("keys", "values"), own, strict=True):
            store.lend(index, layer, name, slice(first, slots))

    def _window(self, layer: Any, window: int | None) -> int | None:
        """Return a layer's `window` if it is worth a store of its own, and what lies before it is never needed."""
        if window is None or not outgrows(window, self.entries.most):
            return None
        # Stock's other sliding layers are given the whole text back.
        ends_in_window = isinstance(layer, DynamicSlidingWindowLayer) and not layer.record_past
        return window if ends_in_window or not self._keep_stock else None

    # ---- fixed shapes -------------------------------------------------------------------------------

    def as_fixed(
        self,
        batch_size: int,
        slots: int,
        nodes: int,
        device: torch.device,
        memory_of: Callable[[str], Zeros],  # storage by the name of its owner
    ) -> Self:
        """Make an empty one on fixed shapes for B rows: T slots for the text, and N after them for a tree.

        Smaller trees stand in the last slots, too.
        """
        entries = self.entries.as_fixed(batch_size, slots + nodes, device, memory_of("target"))
        states = None if self.states is None else FixedStates(self.states, batch_size, memory_of("states"))
        return self._with(entries, states)

    def of_a_seat(self) -> Self:
        """Make one with the same layers for one row, as this one is, whose entries are to be taken in (`take_rows`)."""
        entries = self.entries.like(torch.ones(1, dtype=torch.long), self.entries.capacity)
        known = {} if self.states is None else self.states.committed
        zeros = {slot: torch.zeros_like(state) for slot, state in known.items()}
        return self._with(entries, RunningStates(zeros) if zeros else None)

    def resize(self, rows: int) -> None:
        """Hold so many rows: the first ones, and others after them, which are to be taken in (`take_rows`)."""
        self.entries.resize(rows)
        if self.states is not None:
            self.states.resize(rows)

    def _with(self, entries: SlotCache, states: Any) -> Self:
        """Make one with the same layers over other entries and states, which belongs to no stock cache."""
        other = copy(self)
        other.stock, other.entries, other.states = Cache(layers=[]), entries, states
        layers = list(self.cache.layers)
        stores = dict(zip(self.entries.stores, entries.stores, strict=True))
        for place in attention_places(self.cache) if stores else ():
            layers[place] = SlotLayer(entries, [(stores[store], index) for store, index in layers[place].parts])
        other.cache = Cache(layers=layers) if states is None else self.cache.like(layers, states)
        return other

    def for_nodes(self) -> Self:
        """Share entries and running states, but not the states of nodes: each captured forward has its own."""
        return self if self.states is None else self._with(self.entries, copy(self.states))

    def release(self) -> None:
        """Free entries and states, which another cache holds until it hands them back (`take_rows`)."""
        self.entries.release()
        if self.states is not None:
            self._whole = False
            self.states.committed = dict(self.states.prompt)

    def take_rows(self, other: TargetCache, rows: Sequence[tuple[int, int]]) -> None:
        """See `SlotCache.take_rows`; running states are left out if a commit was interrupted in the other cache."""
        whole, self._whole = other._whole, False
        self.entries.take_rows(other.entries, rows)
        if self.states is not None and whole:
            self.states.take_rows(other.states, rows)
        self._whole = whole

    # ---- rounds -------------------------------------------------------------------------------------

    @property
    def lengths(self) -> Tensor:
        """[B] committed entries per row (positions 0 .. lengths - 1); on the CPU unless shapes are fixed."""
        return self.entries.lengths

    @property
    def longest(self) -> int:
        """Committed entries of the longest row."""
        return self.entries.longest

    def past_positions(self, layer: int) -> Tensor:
        """Position [B, S] of each entry that layer `layer` shows before new ones; -1 where hidden."""
        return self.entries.past_positions(self.cache.layers[layer].parts[0][0])

    def prepare(self, nodes: int) -> None:
        """Make room for `nodes` tree nodes per row."""
        if not self._whole:
            raise RuntimeError("A commit was interrupted, and rounds cannot go on over this cache.")
        self.entries.prepare(nodes)

    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Keep `counts[b]` entries of row b, those of nodes `path[b]` [B, A], and drop the other nodes."""
        self._whole = self.states is None  # from here on, states may cover less text than entries
        self.entries.move(path)
        self.entries.advance(torch.tensor(counts))
        if self.states is not None:
            self.states.commit(path, counts)
        self._whole = True

    def truncate(self, lengths: Tensor) -> None:
        """Drop the last entries of rows that are longer than `lengths` [B], or more of them (see `lengths` then)."""
        now = self.entries.counted
        if self.states is None:
            self.entries.set_lengths(torch.minimum(now, lengths))
        elif (too_long := now > lengths).any():
            self._whole = False
            self.entries.set_lengths(torch.where(too_long, self.prompt_lengths, now))
            self.states.back_to_prompt(too_long)
            self._whole = True

    # ---- what the user passed in --------------------------------------------------------------------

    def write_back(self, grown: int) -> None:
        """Lay the first `grown` entries after the prompt into the stock cache, in stock's slots; once only.

        Every row must have as many. The stock cache is left with the prompt where running states have more or fewer in
        some row, as the state of one is not that of the others, and where rows have parted so far that a sliding window
        has dropped what is asked for. Should it fail, it still holds the prompt as well.
        """
        if self._written_back:
            return
        if not self._whole:
            raise RuntimeError("A commit was interrupted, and this cache cannot be read.")
        ends, stores = self.prompt_lengths + grown, self.entries.stores
        if self.states is None:
            self.truncate(ends)
        kept = [grown if store.window is None else min(grown, store.window) for store in stores]
        dropped = any(int((ends - count).min()) < store.first for store, count in zip(stores, kept, strict=True))
        if dropped or (self.states is not None and bool((self.entries.counted != ends).any())):
            self._take_back()
            return
        with undone_on_failure(self.stock, self._prompt_slots + grown):
            for place in attention_places(self.stock) if self.entries.stores and grown else ():
                self._append(self.stock.layers[place], self.cache.layers[place], grown)
            for slot, state in states_of(self.stock).items():
                state.copy_(self.states.committed[slot])  # in place: captured graphs may read it there
            self._written_back = True
        self._take_back()

    def _take_back(self) -> None:
        """Give layers of the stock cache that show our entries memory of their own, and free ours layer by layer."""
        with suppress(RuntimeError):  # out of memory: they lie where they are
            for store in self.entries.stores:
                for layer, name, _ in store.lent.values():
                    setattr(layer, name, getattr(layer, name).clone())
                if store.lent:
                    store.release()

    def _append(self, stock: Any, own: SlotLayer, grown: int) -> None:
        """Append the last `grown` entries of every row to one layer of the stock cache."""
        if own.parts[0][0].lent:
            self._lend(stock, own.parts, self._prompt_slots + grown)
            if window_of(stock) is not None:
                stock.cumulative_length += grown
            return
        window = own.parts[0][0].window
        count = grown if window is None else min(grown, window)
        starts = self.prompt_lengths + grown - count
        stock.update(*(store.read(index, starts, count) for store, index in own.parts))
        if count < grown:
            stock.cumulative_length += grown - count  # entries that it would have dropped
