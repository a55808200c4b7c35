"""The general form: a tree level by level, every node from a copy of its parent's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hf_dart.cache.states import After, StatefulCache, States, StateSlot


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
