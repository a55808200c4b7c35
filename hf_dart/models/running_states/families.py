"""Families whose modules take a tree at once: how each is put together from a convolution and a gated delta rule.

The projections, gates and norms are the module's own; what is written down here is the order in which its forward calls
them. It is used where it gives what levels give, which is tried once per target.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache

from hf_dart.cache.states import RunningStates, StatefulCache, StateSlot, states_of
from hf_dart.models.forwards import forward_before
from hf_dart.models.running_states.tree_forward import Family, Mixer, Nodes
from hf_dart.models.tolerance import same
from hf_dart.trees.tree import DraftTree

# Modules sum delta rules in float32, whatever their dtype: wider ones are run by levels, which sum as stock does.
WIDEST_RULE = torch.float32

# Deeper than the windows of convolutions, with siblings; the second row has empty nodes.
_TREES = [[-1, 0, 1, 2, 3, 4, 0, 1], [-1, 0, 0, 1, 1, 2, -1, -1]]
_PATHS, _DEPTH = [[0, 1, 2, 3, 4, 5], [0, 1, 3, 0, 0, 0]], 5


def _short_convolution(module: Any, hidden: Tensor, tree: Nodes) -> Tensor:
    before, after, inputs = module.in_proj(hidden).chunk(3, dim=-1)
    return module.out_proj(after * tree.convolve(module.conv, before * inputs))


def _gated(outputs: Tensor, gate: Tensor, norm: nn.Module, projection: nn.Module) -> Tensor:
    """[B, N, H] of outputs [B, N, heads, V] and a gate of as many numbers."""
    batch, nodes, _, width = outputs.shape
    normed = norm(outputs.reshape(-1, width), gate.reshape(-1, width))
    return projection(normed.reshape(batch, nodes, -1))


def _delta_net(module: Any, tree: Nodes, mixed: Tensor, forget: Tensor, rate: Tensor) -> Tensor:
    """Return the outputs [B, N, H, V] of a rule whose heads decay."""
    convolved = tree.convolve(module.conv1d, mixed, module.activation)
    query, key, value = convolved.split((module.key_dim, module.key_dim, module.value_dim), dim=-1)
    query, key = (part.unflatten(-1, (-1, module.head_k_dim)) for part in (query, key))
    value = value.unflatten(-1, (-1, module.head_v_dim))
    log_decay = -module.A_log.float().exp() * F.softplus(forget.float() + module.dt_bias)
    return tree.rule(query, key, value, log_decay, rate)


def _qwen3_next(module: Any, hidden: Tensor, tree: Nodes) -> Tensor:
    projected = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
    query, key, value, gate, rate, forget = module.fix_query_key_value_ordering(*projected)
    mixed = torch.cat([part.flatten(2) for part in (query, key, value)], dim=-1)
    outputs = _delta_net(module, tree, mixed, forget, rate.sigmoid())
    return _gated(outputs, gate, module.norm, module.out_proj)


def _qwen3_5(module: Any, hidden: Tensor, tree: Nodes) -> Tensor:
    rate = module.in_proj_b(hidden).sigmoid()
    outputs = _delta_net(module, tree, module.in_proj_qkv(hidden), module.in_proj_a(hidden), rate)
    return _gated(outputs, module.in_proj_z(hidden), module.norm, module.out_proj)


def _projected(module: Any, hidden: Tensor) -> Tensor:
    return torch.cat([module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)], dim=-1)


def _olmo_hybrid(module: Any, hidden: Tensor, tree: Nodes) -> Tensor:
    rate = module.b_proj(hidden).sigmoid() * (2.0 if module.allow_neg_eigval else 1.0)
    outputs = _delta_net(module, tree, _projected(module, hidden), module.a_proj(hidden), rate)
    return _gated(outputs, module.g_proj(hidden), module.o_norm, module.o_proj)


def _delta_attention(module: Any, hidden: Tensor, tree: Nodes) -> Tensor:
    """Return the outputs [B, N, H, V] of a rule whose channels decay."""
    convolved = tree.convolve(module.conv1d, _projected(module, hidden), module.activation)
    query, key, value = (part.unflatten(-1, (-1, module.head_dim)) for part in convolved.chunk(3, dim=-1))
    return tree.rule(query, key, value, module.forget_gate(hidden), module.b_proj(hidden).sigmoid())


def _kimi_linear(module: Any, hidden: Tensor, tree: Nodes) -> Tensor:
    gate = module.g_b_proj(module.g_a_proj(hidden))
    return _gated(_delta_attention(module, hidden, tree), gate, module.o_norm, module.o_proj)


def _bailing_hybrid(module: Any, hidden: Tensor, tree: Nodes) -> Tensor:
    return _gated(_delta_attention(module, hidden, tree), module.g_proj(hidden), module.o_norm, module.o_proj)


_FAMILIES: dict[str, Family] = {
    "Qwen3NextGatedDeltaNet": _qwen3_next,
    "Qwen3_5GatedDeltaNet": _qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": _qwen3_5,
    "OlmoHybridGatedDeltaNet": _olmo_hybrid,
    "KimiLinearDeltaAttention": _kimi_linear,
    "BailingHybridDeltaAttention": _bailing_hybrid,
    "Lfm2ShortConv": _short_convolution,
    "Lfm2MoeShortConv": _short_convolution,
    "Lfm3ShortConv": _short_convolution,
}


def family_of(module: nn.Module, slots: tuple[StateSlot, ...], cache: Cache, width: int) -> Family | None:
    """Return what takes a tree at once in a mixer with hidden states of that width; None if not as levels do.

    Tried on random inputs, states and commits. `cache` is a stock cache with states in the mixer's slots.
    """
    family = _FAMILIES.get(type(module).__name__)
    if family is None or forward_before(module) is not None:
        return None
    try:
        return family if _agrees(family, module, slots, cache, width) else None
    except Exception:  # a module of another release, or an offloaded one
        return None


def _agrees(family: Family, module: nn.Module, slots: tuple[StateSlot, ...], cache: Cache, width: int) -> bool:
    """Compare both, in float32 or in the module's own dtype if it is wider."""
    weights = [weight for weight in module.parameters() if weight.is_floating_point()]
    own = [weight.dtype for weight in weights]
    widest = max((torch.float32, *own), key=lambda dtype: torch.finfo(dtype).bits)
    has_rule = any(slot.kind == "recurrent_states" for slot in slots)
    if has_rule and torch.finfo(widest).bits > torch.finfo(WIDEST_RULE).bits:
        return False
    module = copy.deepcopy(module).to(widest) if {*own} - {widest} else module
    parents = torch.tensor(_TREES)
    tree = DraftTree.from_parents(torch.zeros_like(parents), parents)
    generator = torch.Generator().manual_seed(0)

    def loud(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=widest).to(weights[0].device)

    states = {slot: loud(len(parents), *states_of(cache)[slot].shape[1:]) for slot in slots}
    held = StatefulCache(cache.layers, cache, RunningStates(states))
    named = [name for name in inspect.signature(type(module).forward).parameters if name.startswith(("cache", "past"))]
    hidden = loud(*parents.shape, width)
    real = (parents >= 0) | (torch.arange(parents.shape[1]) == 0)
    found: list[list[Tensor]] = []
    for mixer in (Mixer(module, slots, family), Mixer(module, slots)):
        held.states.begin(tree)
        outputs = mixer(hidden, **{named[0]: held})
        parts = [part[real.to(part.device)] for part in tree_leaves(outputs)]
        for count in range(1, _DEPTH + 2):
            after = held.states.after(torch.tensor(_PATHS), [count, min(count, 3)])
            parts += [after[slot] for slot in slots]
        found.append(parts)
    return all(same(*pair) for pair in zip(*found, strict=True))
