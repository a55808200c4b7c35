"""The forward that a module with running states has for a while: the one that verifies a tree.

It acts on a `StatefulCache` only, which nobody else has: other calls of the model, in other threads too, do not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_dart.cache.states import After, FixedStates, RunningStates, StatefulCache, StateSlot
from hf_dart.models.forwards import StandIn
from hf_dart.models.running_states.at_once import convolution, delta_rule
from hf_dart.models.running_states.by_levels import by_levels

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
