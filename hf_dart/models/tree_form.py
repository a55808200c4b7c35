"""How a mixer takes a tree: in one call where that is shown to be right, else level by level."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.cache_utils import Cache

from hf_dart.cache.states import RunningStates, StatefulCache, StateSlot, states_of
from hf_dart.models.tree_at_once import AtOnce, taking_node_states
from hf_dart.models.tree_forward import Form, Mixer, by_levels
from hf_dart.trees.tree import DraftTree

# Deeper than the windows of convolutions, with siblings; the second row has empty nodes.
_TREES = [[-1, 0, 1, 2, 3, 4, 0, 1], [-1, 0, 0, 1, 1, 2, -1, -1]]
_PATHS, _DEPTH = [[0, 1, 2, 3, 4, 5], [0, 1, 3, 0, 0, 0]], 5
# The largest difference, in roundings of the largest number. A wrong ancestor makes millions of them.
_ROUNDINGS = 256


def form_of(module: nn.Module, slots: tuple[StateSlot, ...], cache: Cache, args: Any, kwargs: Any) -> Form:
    """`AtOnce` where it gives what `by_levels` does for random inputs, states and commits; `by_levels` elsewhere.

    Compared is in float32, or in the module's own dtype if it is wider: in float64, a rule that rounds to float32
    inside is not the same by another order of sums, and stays by levels.

    Args:
        module: a mixer; it is not changed.
        slots: of its states.
        cache: a stock cache with states in them.
        args, kwargs: of one call of `module`, in which tensors [1, T, ...] are by token, T > 1.
    """
    function = taking_node_states(module.forward)
    if function is None:
        return by_levels
    try:
        return AtOnce(function) if _agree(module, AtOnce(function), slots, cache, args, kwargs) else by_levels
    except Exception:  # unknown code may do anything to a state that is no tensor
        return by_levels


def _agree(module: nn.Module, form: Form, slots: tuple[StateSlot, ...], cache: Cache, args: Any, kwargs: Any) -> bool:
    floats = [part.dtype for part in (*module.parameters(), *tree_leaves((args, kwargs))) if _is_float(part)]
    widest = max((torch.float32, *floats), key=lambda dtype: torch.finfo(dtype).bits)
    mixer = Mixer(copy.deepcopy(module).to(widest) if {*floats} - {widest} else module, slots)
    parents = torch.tensor(_TREES)
    tree = DraftTree.from_parents(torch.zeros_like(parents), parents, _DEPTH)
    generator = torch.Generator().manual_seed(0)

    def loud(part: Any, shape: tuple[int, ...]) -> Any:
        if _is_float(part):
            return torch.randn(*shape, generator=generator, dtype=widest).to(part.device)
        return part[:1].expand(*shape).clone()

    states = {slot: loud(state, (len(parents), *state.shape[1:])) for slot, state in states_of(cache).items()}
    held = StatefulCache(cache.layers, cache, RunningStates(states))
    tokens = next(part.shape[1] for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor))

    def given(part: Any) -> Any:
        if part is cache:
            return held
        by_token = isinstance(part, Tensor) and part.shape[:2] == (1, tokens)
        return loud(part[:, :1], (*parents.shape, *part.shape[2:])) if by_token else part

    args, kwargs = tree_map(given, (args, kwargs))
    real = (parents >= 0) | (torch.arange(parents.shape[1]) == 0)
    found: list[list[Tensor]] = []
    for one in (by_levels, form):
        held.states.begin(tree)
        outputs = tree_leaves(one(mixer, mixer.module.forward, held, args, kwargs))
        parts = [part[real.to(part.device)] for part in outputs if isinstance(part, Tensor)]
        for count in range(1, _DEPTH + 2):
            after = held.states.after(torch.tensor(_PATHS), [count, min(count, 3)])
            parts += [after[slot] for slot in slots]
        found.append(parts)
    allowed = _ROUNDINGS * torch.finfo(widest).eps
    return all(
        left.shape == right.shape and bool((left - right).abs().max() <= allowed * left.abs().max())
        for left, right in zip(*found, strict=True)
    )


def _is_float(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point()
