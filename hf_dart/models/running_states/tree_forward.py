"""The forward that a module with running states has for a while: the one that verifies a tree, at once or by levels.

It acts on a `StatefulCache` only, which nobody else has: other calls of the model, in other threads too, do not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hf_dart.cache.states import After, FixedStates, RunningStates, StatefulCache, States, StateSlot
from hf_dart.models.forwards import StandIn
from hf_dart.models.running_states.at_once import convolution, delta_rule

# Larger trees are run by levels, as the cost of nodes attending to each other grows with the square of their number
# or faster. So is a single node, wherever trees may be: then it is stock's own step.
MOST = 128


class Nodes:
    """The tree that a module is to take, as one convolution and at most one rule see it; `after` is what they leave."""

    def __init__(self, slots: Sequence[StateSlot], held: RunningStates) -> None:
        self._slots = {slot.kind: slot for slot in slots}
        self._held = held
        self.after: dict[StateSlot, After] = {}

    def convolve(self, conv: nn.Conv1d, inputs: Tensor, activation: str | None = None) -> Tensor:
        """See `at_once.convolution`: of inputs [B, N, C]."""
        slot = self._slots["conv_states"]
        text = self._held.committed[slot]
        paths = self._held.paths(text.device)
        mixed, self.after[slot] = convolution(inputs, text, paths, conv.weight, conv.bias, activation)
        return mixed

    def rule(self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor) -> Tensor:
        """See `at_once.delta_rule`."""
        slot = self._slots["recurrent_states"]
        text = self._held.committed[slot]
        mixed, self.after[slot] = delta_rule(query, key, value, log_decay, rate, text, self._held.paths(text.device))
        return mixed


Family = Callable[[Any, Tensor, Nodes], Tensor]
"""The outputs [B, N, H] of a module for the hidden states [B, N, H] of nodes."""


@dataclass(eq=False)
class Mixer(StandIn):
    """A module that keeps running states, such as a linear attention; called, it is the module's forward for trees."""

    slots: tuple[StateSlot, ...]  # where the cache keeps its states
    family: Family | None = None  # takes trees at once; None where they go level by level

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        cache = next((part for part in given if isinstance(part, StatefulCache)), None)
        if cache is None:
            return self._forward(*args, **kwargs)
        held = cache.states
        fewest = 1 if isinstance(held, FixedStates) else 2
        if self.family is None or not fewest <= held.tree.size <= MOST:
            return by_levels(self.slots, self._forward, cache, args, kwargs)
        nodes = Nodes(self.slots, held)
        outputs = self.family(self.module, args[0] if args else kwargs["hidden_states"], nodes)
        held.keep(nodes.after)
        return outputs


def by_levels(
    slots: Sequence[StateSlot],
    forward: Callable[..., Any],
    cache: StatefulCache,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a mixer's own forward over the nodes of a tree: level by level, each node as stock's own single-token step.

    This is right for every mixer whose single steps are. A faster form for some families is held against this one
    before it is used (`hf_dart.models.running_states.families`). Tensors [B, N, ...] among the arguments and the
    outputs are by node; the cache is one of the arguments, and its states in `slots` are not written to.
    """
    levels = cache.states.levels
    on_host = levels(torch.device("cpu"))
    states = {slot: cache.states.committed[slot] for slot in slots}
    flat, form = tree_flatten((args, kwargs))
    outputs: list[Any] = []
    kept: list[States] = []
    for depth in range(len(on_host.levels)):
        lent = cache.lend({slot: state[levels(state.device).levels[depth].parents] for slot, state in states.items()})

        def of_level(part: Any, depth: int = depth, lent: Any = lent) -> Any:
            """[M, 1, ...] of a tensor [B, N, ...]."""
            if part is cache:
                return lent
            if not isinstance(part, Tensor) or part.shape[:2] != on_host.order.shape:
                return part
            level = levels(part.device).levels[depth]
            return part[level.rows, level.nodes][:, None]

        own_args, own_kwargs = tree_unflatten([of_level(part) for part in flat], form)
        outputs.append(forward(*own_args, **own_kwargs))
        states = {slot: slot.read(lent) for slot in slots}
        kept.append(states)
    places = [(depth, place) for depth, level in enumerate(on_host.levels) for place in range(len(level.rows))]

    def state_of(slot: StateSlot) -> After:
        def after(nodes: Tensor) -> Tensor:
            orders = on_host.order[range(len(nodes)), nodes.cpu()].tolist()
            return torch.stack([kept[depth][slot][place] for depth, place in (places[order] for order in orders)])

        return after

    cache.states.keep({slot: state_of(slot) for slot in slots})

    def of_nodes(*parts: Any) -> Any:
        """[B, N, ...] of what came out for each level, [M, 1, ...]."""
        if not isinstance(parts[0], Tensor):
            return parts[0]
        return torch.cat(parts)[levels(parts[0].device).order, 0]

    return tree_map(of_nodes, *outputs)
