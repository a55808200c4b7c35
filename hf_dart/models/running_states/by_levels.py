"""The general form: a tree level by level, every node from a copy of its parent's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hf_dart.cache.states import LevelStates, StatefulCache
from hf_dart.models.running_states.tree_forward import Mixer
from hf_dart.trees.levels import Level, TreeLevels


def by_levels(
    mixer: Mixer, forward: Callable[..., Any], cache: StatefulCache, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a mixer over the nodes of a tree: level by level, each node as stock's own single-token step.

    This is right for every mixer whose single steps are. A faster form for some families is held against this one
    before it is used (`hf_dart.models.running_states.families`).

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
    for depth in range(len(levels.levels)):
        lent = cache.lend({slot: state[moved.level(depth, state).parents] for slot, state in states.items()})
        own_args, own_kwargs = tree_unflatten([_of_level(part, cache, lent, moved, depth) for part in flat], form)
        outputs.append(forward(*own_args, **own_kwargs))
        states = {slot: slot.read(lent) for slot in mixer.slots}
        kept.append(states)
    cache.states.keep(LevelStates(levels, kept))
    return tree_map(lambda *parts: _of_nodes(parts, moved), *outputs)


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
