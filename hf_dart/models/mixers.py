"""Which modules of a target keep running states: found by one forward that is looked at, not by their names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from hf_dart.cache.states import OwnState, Slot, StateSlot, states_of
from hf_dart.cache.stock_layers import keeps_states
from hf_dart.models.devices import device_of
from hf_dart.models.identity import identity
from hf_dart.models.stock_steps import StockSteps
from hf_dart.models.tree_form import form_of
from hf_dart.models.tree_forward import Form, Mixer, by_levels
from hf_dart.models.untouched import as_before

_TOKENS = 4


@dataclass
class _Seen:
    """What a module asks of a cache, and what states it keeps itself."""

    slots: set[Slot] = field(default_factory=set)
    entries: bool = False


# Of each model, as it was then: names of its mixers, their slots, and how they take trees.
_Found = list[tuple[str, tuple[Slot, ...], Form]]
_found: WeakKeyDictionary[Any, tuple[Any, _Found]] = WeakKeyDictionary()


@torch.no_grad()
def mixers_of(model: PreTrainedModel) -> list[Mixer]:
    """The outermost modules that ask a cache for running states, or keep them; two forwards find them, once.

    Raises:
        ValueError: one of them keeps keys and values, too.
    """
    now = identity(model)
    if model not in _found or _found[model][0] != now:
        _found[model] = now, _names_of(model)
    return [Mixer(model.get_submodule(name), slots, form) for name, slots, form in _found[model][1]]


def own_states(model: PreTrainedModel, cache: Cache) -> list[OwnState]:
    """The running states that modules of the model keep themselves, where its cache has layers that stay empty."""
    if not any(map(keeps_states, cache.layers)):
        return []
    return [slot for mixer in mixers_of(model) for slot in mixer.own]


def takes_levels(model: PreTrainedModel) -> bool:
    """Is there a mixer that takes trees level by level, so that each level has a cost?"""
    return by_levels in tree_forms(model)


def tree_forms(model: PreTrainedModel) -> list[Form]:
    """How each mixer takes a tree: `by_levels`, or in one call; empty for a target without running states."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return [mixer.form or by_levels for mixer in mixers_of(model)] if any(map(keeps_states, layers)) else []


@contextmanager
def level_by_level(model: PreTrainedModel) -> Iterator[None]:
    """Within it no mixer of the model takes a tree in one call: for measurements."""
    mixers_of(model)
    now, found = _found[model]
    _found[model] = now, [(name, slots, by_levels) for name, slots, _ in found]
    try:
        yield
    finally:
        _found[model] = now, found


def _names_of(model: PreTrainedModel) -> _Found:
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    tokens = torch.arange(_TOKENS, device=device_of(model.get_input_embeddings()))[None]
    with as_before(model), _noted(model, cache) as (seen, given):
        steps = StockSteps(model, tokens, [0], cache)
        steps.prefill()
        held = states_of(cache)
        if {slot.layer for slot in held} != {place for place, layer in enumerate(cache.layers) if keeps_states(layer)}:
            for slot in _own_states(model, steps, tokens[:, 1:2]):
                seen.setdefault(slot.module, _Seen()).slots.add(slot)
    found: _Found = []
    forms: dict[Any, Form] = {}
    for name, module in model.named_modules():
        inside = {part: seen[part] for part in module.modules() if part in seen}
        if module in seen and seen[module].slots and not any(name.startswith(f"{outer}.") for outer, *_ in found):
            if any(one.entries for one in inside.values()):
                raise ValueError(
                    f"A {type(module).__name__} keeps keys and values and a running state in one module, which cannot "
                    "be run node by node; call generate without assistant=."
                )
            slots = [slot for one in inside.values() for slot in one.slots]
            lent = tuple(sorted(slot for slot in slots if isinstance(slot, StateSlot) and slot in held))
            own = tuple(slot for slot in slots if isinstance(slot, OwnState))
            code = type(module), bool(own), *((slot.kind, slot.number) for slot in lent)
            if code not in forms:
                with torch.autocast(tokens.device.type, enabled=False):  # its roundings would hide what differs
                    forms[code] = by_levels if own else form_of(module, lent, cache, *given[module])
            found.append((name, lent + own, forms[code]))
    return found


def _own_states(model: PreTrainedModel, steps: StockSteps, token: Tensor) -> list[OwnState]:
    """Attributes [1, ...] of modules that a further token [1, 1] changes."""
    before = [
        (OwnState(module, name), value, value.clone())
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.shape[:1] == (1,)
    ]
    steps(token)
    after = [(slot, value, content, slot.read()) for slot, value, content in before]
    return [slot for slot, value, content, now in after if now is not value or not torch.equal(now, content)]


@contextmanager
def _noted(
    model: nn.Module, cache: DynamicCache
) -> Iterator[tuple[dict[nn.Module, _Seen], dict[nn.Module, tuple[Any, Any]]]]:
    """Which module runs whenever the cache is asked for something, and what modules were last called with."""
    running: list[nn.Module] = []
    calls: dict[nn.Module, tuple[Any, Any]] = {}
    seen: dict[nn.Module, _Seen] = {}
    thread = get_ident()  # others may run the model at the same time

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if get_ident() == thread:
            running.append(module)
            calls[module] = args, kwargs

    def leave(*_: Any) -> None:
        if get_ident() == thread:
            running.pop()

    def watched(name: str, method: Any) -> Any:
        kind = "conv_states" if "conv" in name else "recurrent_states"
        signature = inspect.signature(method)

        def asked(*args: Any, **kwargs: Any) -> Any:
            one = seen.setdefault(running[-1], _Seen())
            if name == "update":
                one.entries = True
            else:
                given = signature.bind(*args, **kwargs).arguments
                one.slots.add(StateSlot(given["layer_idx"], kind, given.get("state_idx", 0)))
            return method(*args, **kwargs)

        return asked

    hooks = []
    names = ("update", "get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state")
    for name in names:
        setattr(cache, name, watched(name, getattr(cache, name)))
    try:
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(leave, always_call=True))
        yield seen, calls
    finally:
        for hook in hooks:
            hook.remove()
