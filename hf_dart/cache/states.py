"""Running states: what linear attention, Mamba and short convolutions keep of the text in place of its entries.

A state holds the whole text before it, so that a rejected draft cannot be cut off it: every node of a tree is computed
from its parent's state (`hf_dart.models.running_states`), and a commit takes the state of the last accepted node.
Committed states are not written into: those after the prompt are what a row goes back to that has gone too far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.cache_utils import Cache

from hf_dart.cache.stock_layers import LinearAttentionLayer, keeps_entries, keeps_states, take_states
from hf_dart.trees.tree import DraftTree, TreeLevels, TreePaths


class StateSlot(NamedTuple):
    """The place of one running state [B, ...] in a stock cache; `kind` is "conv_states" or "recurrent_states"."""

    layer: int
    kind: str
    number: int

    def read(self, cache: Cache) -> Any:
        """Return the state that a stock cache has there."""
        return getattr(cache.layers[self.layer], self.kind)[self.number]

    def write(self, cache: Cache, state: Any) -> None:
        """Put a state there in place of what was."""
        getattr(cache.layers[self.layer], self.kind)[self.number] = state


States = dict[StateSlot, Tensor]


def states_of(cache: Cache) -> dict[StateSlot, Tensor]:
    """All running states of a stock cache, the very tensors."""
    found = {}
    for place, layer in enumerate(cache.layers):
        for kind in ("conv_states", "recurrent_states") if keeps_states(layer) else ():
            for number, state in getattr(layer, kind).items():
                if state is not None:
                    found[StateSlot(place, kind, number)] = state
    return found


After = Callable[[Tensor], Tensor]
"""One running state [B, ...] after node `nodes[b]` [B] of each row of a tree that was verified."""


class RunningStates:
    """The running states of B rows, and those of the nodes of the tree that was verified last.

    Those after the `prompt` are not written to; `committed` ones are after the committed tokens of each row; `tree` is
    the one that is being verified.
    """

    def __init__(self, prompt: Mapping[Any, Tensor]) -> None:
        self.prompt: States = dict(prompt)
        self.committed: States = dict(prompt)
        self._nodes: dict[StateSlot, After] = {}

    def begin(self, tree: DraftTree) -> None:
        """Prepare for a tree to be verified: drop node states of the one before."""
        self.tree, self._nodes = tree, {}
        self._levels: dict[torch.device, TreeLevels] = {}
        self._paths: dict[torch.device, TreePaths] = {}

    def levels(self, device: torch.device) -> TreeLevels:
        """Return the levels of that tree, on `device`."""
        if not self._levels:
            self._levels[torch.device("cpu")] = TreeLevels.of(self.tree)
        if device not in self._levels:
            self._levels[device] = tree_map(lambda part: part.to(device), self._levels[torch.device("cpu")])
        return self._levels[device]

    def paths(self, device: torch.device) -> TreePaths:
        """Return the paths of that tree, on `device`."""
        if device not in self._paths:
            self._paths[device] = TreePaths.of(self.tree, device)
        return self._paths[device]

    def keep(self, nodes: Mapping[StateSlot, After]) -> None:
        """Keep states of the nodes of this tree until one of them is committed."""
        self._nodes.update(nodes)

    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Take the states after the first `counts[b]` nodes of `path[b]` [B, A]; all at once, or none."""
        self.take(self.after(path, counts))

    def take(self, states: States) -> None:
        """Let these be the committed states."""
        self.committed = states

    def after(self, path: Tensor, counts: list[int] | Tensor) -> States:
        """Return the states that `commit` would take. A tensor of counts [B] is not read on the host."""
        if path.shape[1] == 0:
            return dict(self.committed)
        number = torch.as_tensor(counts, device=path.device)
        nodes = path.gather(1, (number - 1).clamp(min=0)[:, None])[:, 0]
        new = {slot: after(nodes) for slot, after in self._nodes.items()}
        return self.committed | {
            slot: torch.where(_like(number > 0, state), state, self.committed[slot]) for slot, state in new.items()
        }

    def take_rows(self, other: RunningStates, rows: Sequence[tuple[int, int]]) -> None:
        """Take the states of row `there` of another cache in row `here`, for each pair (here, there)."""
        here, there = torch.tensor(rows).T
        self.take(
            {
                slot: state.index_copy(0, here.to(state.device), other.committed[slot][there])
                for slot, state in self.committed.items()
            }
        )

    def resize(self, rows: int) -> None:
        """Hold states of so many rows: the first ones, and zeros after them."""
        kept = {slot: state[:rows] for slot, state in self.committed.items()}
        self.take(
            {slot: torch.cat([own, own.new_zeros(rows - len(own), *own.shape[1:])]) for slot, own in kept.items()}
        )

    def back_to_prompt(self, rows: Tensor) -> None:
        """Take the states after the prompt again in some rows, [B] bool."""
        self.take(
            {slot: torch.where(_like(rows, state), self.prompt[slot], state) for slot, state in self.committed.items()}
        )


class FixedStates(RunningStates):
    """Running states of B rows in buffers that stay where they are, of the shapes of those of a call."""

    def __init__(self, like: RunningStates, batch: int, zeros: Callable[..., Tensor]) -> None:
        super().__init__(
            {
                slot: zeros(str(tuple(slot)), (batch, *state.shape[1:]), state.dtype, state.device)
                for slot, state in like.committed.items()
            }
        )

    def levels(self, device: torch.device) -> TreeLevels:
        raise RuntimeError("a tree of so many nodes goes level by level, as the host lays it out")

    def take(self, states: States) -> None:
        """Write these into the buffers; captured forwards do the same with those of nodes, which are kept."""
        for slot, state in self.committed.items():
            state.copy_(states[slot])


def _like(rows: Tensor, state: Tensor) -> Tensor:
    """`rows` [B] in the shape [B, 1, ...] of a state."""
    return rows.to(state.device).view(-1, *[1] * (state.ndim - 1))


def _emptied(layer: Any) -> Any:
    """Return a stock layer that has taken in as much as another one, without its states."""
    made = LinearAttentionLayer()
    take_states(made, layer)
    made.conv_states, made.recurrent_states = dict.fromkeys(made.conv_states), dict.fromkeys(made.recurrent_states)
    return made


class StatefulCache(Cache):
    """A cache for verifying trees: attention layers that take nodes, and running states that are lent, not written."""

    def __init__(self, layers: Iterable[Any], stock: Cache, states: RunningStates) -> None:
        self.states = states
        self._known = {place: _emptied(layer) for place, layer in enumerate(stock.layers) if keeps_states(layer)}
        own = list(layers)
        for place, layer in enumerate(own):
            if keeps_states(layer) and not keeps_entries(layer):
                own[place] = LinearAttentionLayer(number_of_states=layer.number_of_states)
        super().__init__(layers=own)

    def like(self, layers: Iterable[Any], states: RunningStates) -> StatefulCache:
        """One with other layers of the attention and other states."""
        other = StatefulCache(layers, Cache(layers=[]), states)
        other._known = self._known
        return other

    def lend(self, states: Mapping[Any, Any]) -> Cache:
        """Return a stock cache that holds these states, tensors or what stands for them, and may write into them."""
        layers = list(self.layers)
        for place in {slot.layer for slot in states}:
            layers[place] = LinearAttentionLayer()
            take_states(layers[place], self._known[place])
        lent = Cache(layers=layers)
        for slot, state in states.items():
            slot.write(lent, state)
        return lent

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("A module that was not known to keep a running state asks for one.")

    get_recurrent_state = update_conv_state = update_recurrent_state = get_conv_state
