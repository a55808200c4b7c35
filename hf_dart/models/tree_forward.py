"""The forward of a module with running states over a token tree: every node from a copy of its parent's state.

For the one forward that verifies a tree, and on these instances alone, `forward` is another one (`tree_forwards`). It
acts on a `StatefulCache` only, which nobody else has: other calls of the model, in other threads too, do not notice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hf_dart.cache.states import LevelStates, OwnState, Slot, StatefulCache, states_put_back
from hf_dart.models.stand_in import StandIn
from hf_dart.trees.levels import Level, TreeLevels


@dataclass(frozen=True)
class Mixer:
    """A module that keeps running states, such as a linear attention.

    Attributes:
        module: what runs.
        slots: where the cache, or the module itself, keeps its states.
        form: how it takes trees; None is `by_levels`.
    """

    module: nn.Module
    slots: tuple[Slot, ...]
    form: Form | None = None

    @property
    def own(self) -> list[OwnState]:
        """Those that the module itself keeps."""
        return [slot for slot in self.slots if isinstance(slot, OwnState)]

    @cached_property
    def tree_forward(self) -> TreeForward:
        """What stands in the module while trees are verified: always the same, for which compiled code looks."""
        return TreeForward(self)


def by_levels(
    mixer: Mixer, forward: Callable[..., Any], cache: StatefulCache, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a mixer gives for the nodes of a tree: level by level, each node as stock's own single-token step.

    This is right for every mixer whose single steps are. A faster form for one kind of mixer (a `Form`, see
    `hf_dart.models.tree_at_once`) keeps the states of the nodes in `cache.states` likewise (`RunningStates.keep`), and
    is held against this one before it is used (`hf_dart.models.tree_form`).

    Args:
        forward: the module's own forward.
        cache: among the arguments; its states are not written to.
        args, kwargs: the arguments; tensors [B, N, ...] among them are by node.

    Returns:
        The module's outputs, in which tensors are [B, N, ...].
    """
    levels = cache.states.levels
    states = {slot: cache.states.committed[slot] for slot in mixer.slots}
    flat, form = tree_flatten((args, kwargs))
    moved = _Moved(levels)
    outputs, kept = [], []
    with states_put_back(mixer.own):
        for depth in range(len(levels.levels)):
            lent = cache.lend({slot: state[moved.level(depth, state).parents] for slot, state in states.items()})
            own_args, own_kwargs = tree_unflatten([_of_level(part, cache, lent, moved, depth) for part in flat], form)
            outputs.append(forward(*own_args, **own_kwargs))
            states = {slot: slot.read(lent) for slot in mixer.slots}
            kept.append(states)
    cache.states.keep(LevelStates(levels, kept))
    return tree_map(lambda *parts: _of_nodes(parts, moved), *outputs)


Form = Callable[[Mixer, Callable[..., Any], StatefulCache, tuple[Any, ...], dict[str, Any]], Any]
"""What a mixer gives for the nodes of a tree; the arguments are those of `by_levels`."""


class _Moved:
    """The levels of a tree on every device that a mixer computes on."""

    def __init__(self, levels: TreeLevels) -> None:
        self.shape = levels.shape
        self._levels = {torch.device("cpu"): levels}

    def on(self, device: torch.device) -> TreeLevels:
        if device not in self._levels:
            self._levels[device] = self._levels[torch.device("cpu")].to(device)
        return self._levels[device]

    def level(self, depth: int, like: Tensor) -> Level:
        return self.on(like.device).levels[depth]


def _of_level(part: Any, cache: StatefulCache, lent: Any, moved: _Moved, depth: int) -> Any:
    """An argument for the nodes of one level: [M, 1, ...] of a tensor [B, N, ...]."""
    if part is cache:
        return lent
    if not isinstance(part, Tensor) or part.shape[:2] != moved.shape:
        return part
    level = moved.level(depth, part)
    return part[level.rows, level.nodes][:, None]


def _of_nodes(parts: Sequence[Any], moved: _Moved) -> Any:
    """[B, N, ...] of what came out for each level, [M, 1, ...]."""
    if not isinstance(parts[0], Tensor):
        return parts[0]
    return torch.cat(list(parts))[moved.on(parts[0].device).order, 0]


class TreeForward(StandIn):
    """A module's forward while trees are verified, for which it stands in its instance.

    Attributes:
        users: calls that verify trees at this moment, in all threads.
    """

    def __init__(self, mixer: Mixer) -> None:
        self.users = 0
        self._mixer = mixer
        self.look()

    def look(self) -> None:
        """See what the module has now."""
        self.before, self._forward = vars(self._mixer.module).get("forward"), self._mixer.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        cache = next((part for part in given if isinstance(part, StatefulCache)), None)
        if cache is None:
            return self._forward(*args, **kwargs)
        return (self._mixer.form or by_levels)(self._mixer, self._forward, cache, args, kwargs)


_INSTALLING = threading.Lock()


@contextmanager
def tree_forwards(mixers: Sequence[Mixer]) -> Iterator[None]:
    """Let the mixers take trees for a while: a forward of their model over a `StatefulCache` gives what nodes need.

    Which tree is said by `RunningStates.begin`.
    """
    entered: list[Mixer] = []
    try:
        for mixer in mixers:
            with _INSTALLING:
                members = vars(mixer.module)
                if not isinstance(members.get("forward"), TreeForward):
                    mixer.tree_forward.look()
                    members["forward"] = mixer.tree_forward
                members["forward"].users += 1
                entered.append(mixer)
        yield
    finally:
        for mixer in entered:
            with _INSTALLING:
                ours = vars(mixer.module)["forward"]
                ours.users -= 1
                if ours.users == 0:
                    del vars(mixer.module)["forward"]
                    if ours.before is not None:
                        vars(mixer.module)["forward"] = ours.before
