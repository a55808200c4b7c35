"""Keys and values on fixed shapes: T slots for committed tokens, position p in slot p, and N after them for a tree."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_dart.cache.hybrid import HybridCache
from hf_dart.cache.ragged import RaggedCache
from hf_dart.cache.slots import SlotStore
from hf_dart.cache.states import RunningStates, StatefulCache
from hf_dart.cache.stock_layers import attention_places
from hf_dart.drafters.state import SlotState
from hf_dart.engine.memory import Memory
from hf_dart.trees.levels import TreeLevels


class FixedLayer(CacheLayerMixin):
    """One attention layer: nodes are written into the last slots, and all slots are shown.

    Args:
        keys, values: [B, heads, T + N, head_dim].
        nodes: N.
        computed: [M] nodes of all rows, if those alone are computed.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, nodes: int, computed: Tensor | None) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.nodes, self.computed = nodes, computed
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The buffers exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        first = self.keys.shape[2] - self.nodes
        for buffer, given in ((self.keys, key_states), (self.values, value_states)):
            states = given.to(buffer.dtype)  # under autocast they may have another
            if self.computed is None:
                buffer[:, :, first:] = states
            else:  # [1, heads, M, head_dim] of nodes here and there
                rows, slots = self.computed // self.nodes, first + self.computed % self.nodes
                buffer[rows, :, slots] = states[0].transpose(0, 1)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_max_length(self) -> int:
        return self.get_seq_length()


class FixedStates(RunningStates):
    """Running states of B rows in buffers that stay where they are; they are taken from node states at a given moment.

    Args:
        like: the eager round's.
        batch: B.
        memory: where they lie.
    """

    takes_levels = False

    def __init__(self, like: RunningStates, batch: int, memory: Memory) -> None:
        zeros = memory.of("states")
        super().__init__(
            {
                slot: zeros(str(tuple(slot)), (batch, *state.shape[1:]), state.dtype, state.device)
                for slot, state in like.committed.items()
            }
        )

    @property
    def levels(self) -> TreeLevels:
        raise RuntimeError("a tree of so many nodes goes level by level, as the host lays it out")

    def load(self, like: RunningStates, rows: Sequence[int]) -> None:
        """Take over the states of a call's rows [B]."""
        for slot, state in self.committed.items():
            state.copy_(like.committed[slot][list(rows)])

    def accepted(self, path: Tensor, counts: Tensor) -> list[Tensor]:
        """What `take` is to be given for the first `counts` [B] nodes of `path` [B, A]; node states are dropped."""
        new = [*self.after(path, counts).values()]
        self._nodes, self._paths = [], {}
        return new

    def commit(self, path: Tensor, counts: list[int]) -> None:
        # Node states stay: a captured forward leaves those of the next tree in their place.
        self.take([*self.after(path, torch.tensor(counts, device=path.device)).values()])

    def take(self, states: Sequence[Tensor]) -> None:
        """Write other states into the buffers."""
        for mine, given in zip(self.committed.values(), states, strict=True):
            mine.copy_(given)


class FixedCache:
    """The target's cache in one tier, as `verify.Verifier` reads it.

    Args:
        like: the eager round's cache, whose layers it has.
        batch: B.
        slots: T.
        nodes: N.
        budget: M, if the target runs over so many nodes of all rows.
        memory: where keys and values lie.

    Attributes:
        cache: goes into the target's forward as `past_key_values`.
        states: its running states, if it keeps any.
        lengths: [B] committed entries per row, on the device.
        computed: [M] those nodes (`budget.computed`), to be filled in before a forward; None for all.
    """

    def __init__(
        self,
        like: RaggedCache | HybridCache,
        batch: int,
        slots: int,
        nodes: int,
        device: torch.device,
        memory: Memory,
        budget: int | None = None,
    ) -> None:
        self.store = SlotStore(like.store.specs, batch, slots + nodes, zeros=memory.of("target"))
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.computed = None if budget is None else torch.arange(budget, device=device)
        self.states = FixedStates(like.states, batch, memory) if isinstance(like, HybridCache) else None
        self._show(like, nodes)

    def for_nodes(self, like: RaggedCache | HybridCache, nodes: int) -> FixedCache:
        """The same cache for trees of fewer nodes, which stand in its last slots too."""
        other = copy(self)
        other.states = copy(self.states)  # in the same buffers; each captured forward has nodes of its own
        other._show(like, nodes)
        return other

    def _show(self, like: RaggedCache | HybridCache, nodes: int) -> None:
        """Lay out the last slots for trees of so many nodes."""
        self.slots = self.store.capacity - nodes
        layers: list[Any] = list(like.cache.layers)
        buffers = iter(self.store.buffer(index) for index in range(len(like.store.specs)))
        for place in attention_places(like.cache):
            layers[place] = FixedLayer(next(buffers), next(buffers), nodes, self.computed)
        self.cache = Cache(layers=layers)
        if self.states is not None:
            assert isinstance(like.cache, StatefulCache)
            self.cache = like.cache.like(layers, self.states)

    def load_states(self, like: RaggedCache | HybridCache, rows: Sequence[int]) -> None:
        """Take over the running states of a call's rows [B], if there are any."""
        if self.states is not None and isinstance(like, HybridCache):
            self.states.load(like.states, rows)

    def hand_to(self, cache: RaggedCache | HybridCache, lengths: Tensor, rows: list[int], whole: bool) -> None:
        """Let a call's own cache take over what has been committed, `lengths` [B], of its rows [B].

        Running states are not those of `lengths` where a commit was broken off (not `whole`): they are left out.
        """
        if isinstance(cache, HybridCache):
            assert self.states is not None
            cache.take_in(self.store, lengths, rows, self.states.committed if whole else None)
        else:
            cache.take_in(self.store, lengths, rows)

    def past_positions(self, layer: int, nodes: int) -> Tensor:
        """[B, T] position of each committed entry; -1 where there is none."""
        places = torch.arange(self.slots, device=self.lengths.device)
        return torch.where(places < self.lengths[:, None], places, -1)

    def prepare(self, nodes: int) -> None:
        """There is room."""

    def commit(self, path: Tensor) -> None:
        """Move the entries of nodes `path` [B, A] after the committed ones.

        What follows a row's last accepted node moves too: nobody looks at it, and the next round overwrites it.
        """
        steps = torch.arange(path.shape[1], device=path.device)
        self.store.move(self.slots + path, self.lengths[:, None] + steps)


@dataclass
class FixedDraftCache(SlotState):
    """The head's cache in one tier: entries of all rows at places of their own, and every slot looked at.

    Attributes:
        buffers: those of the store.
    """

    buffers: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, state: SlotState, batch: int, slots: int, memory: Memory) -> FixedDraftCache:
        """An empty one of B rows for heads whose state is like `state`."""
        store = SlotStore(state.store.specs, batch, slots, zeros=memory.of("head"))
        buffers = [store.buffer(index) for index in range(len(state.store.specs))]
        none = torch.zeros(batch, dtype=torch.long)
        return cls(store, none.to(state.lengths.device), none, buffers)

    def ahead(self) -> FixedDraftCache:
        """The same entries for a draft that may yet be dropped: what it takes in is not counted here."""
        return FixedDraftCache(self.store, self.lengths, self.counted, self.buffers)

    @property
    def ragged(self) -> bool:
        return True

    def reach(self, entries: int) -> int:
        return self.store.capacity

    def write(self, index: int, values: Tensor, positions: Tensor) -> Tensor:
        # Not scatter_, for which compiled code copies the whole buffer.
        places, rows = positions[:, : values.shape[2]], torch.arange(len(values), device=values.device)
        self.buffers[index][rows[:, None], :, places] = values.transpose(1, 2).to(self.buffers[index].dtype)
        return self.buffers[index]

    def advance(self, counts: Tensor) -> None:
        self.lengths = self.lengths + counts
