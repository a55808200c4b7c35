"""Modules of a target that keep running states: found by one forward that is looked at, not by their names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from hf_dart.cache.states import StateSlot, states_of
from hf_dart.cache.stock_layers import keeps_states
from hf_dart.models.devices import device_of
from hf_dart.models.forwards import forward_before
from hf_dart.models.identity import as_before, identity
from hf_dart.models.running_states.families import family_of
from hf_dart.models.running_states.tree_forward import Family, Mixer
from hf_dart.models.stock_steps import StockSteps

_TOKENS = 4

# Per model, by its identity: names of its mixers, their slots, and what takes trees at once.
_Found = list[tuple[str, tuple[StateSlot, ...], Family | None]]
_found: WeakKeyDictionary[Any, tuple[Any, _Found]] = WeakKeyDictionary()


@torch.no_grad()
def mixers_of(model: PreTrainedModel) -> list[Mixer]:
    """Return the outermost modules that ask a cache for running states; one forward finds them, once."""
    now = identity(model)
    if model not in _found or _found[model][0] != now:
        _found[model] = now, _names_of(model)
    return [Mixer(model.get_submodule(name), slots, family) for name, slots, family in _found[model][1]]


def takes_levels(model: PreTrainedModel) -> bool:
    """Return True if a mixer of running states processes trees level by level, so that each level has a cost."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return any(map(keeps_states, layers)) and any(mixer.family is None for mixer in mixers_of(model))


def _names_of(model: PreTrainedModel) -> _Found:
    text = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=text)
    tokens = torch.arange(_TOKENS, device=device_of(model.get_input_embeddings()))[None]
    with as_before(model), _noted(model, cache) as asked:
        StockSteps(model, tokens, [0], cache).prefill()
    held = states_of(cache)
    found: _Found = []
    families: dict[Any, Family | None] = {}
    for name, module in model.named_modules():
        inside = {slot for part in module.modules() for slot in asked.get(part, ())}
        outermost = not any(name.startswith(f"{outer}.") for outer, *_ in found)
        if not outermost or not any(slot is not None for slot in asked.get(module, ())):
            continue
        if None in inside:
            raise ValueError(
                f"A {type(module).__name__} keeps keys and values and a running state in one module, which cannot "
                "be run node by node; call generate without assistant=."
            )
        slots = tuple(sorted(slot for slot in inside if slot in held))
        code = type(module), forward_before(module) is None, *((slot.kind, slot.number) for slot in slots)
        if code not in families:
            with torch.autocast(tokens.device.type, enabled=False):  # its rounding would hide differences
                families[code] = family_of(module, slots, cache, text.hidden_size)
        found.append((name, slots, families[code]))
    return found


@contextmanager
def _noted(model: nn.Module, cache: DynamicCache) -> Iterator[dict[nn.Module, set[StateSlot | None]]]:
    """Note of which states each module asks the cache while it runs; None stands for keys and values."""
    running: list[nn.Module] = []
    asked: dict[nn.Module, set[StateSlot | None]] = {}
    thread = get_ident()  # others may run the model at the same time

    def enter(module: nn.Module, *_: Any) -> None:
        if get_ident() == thread:
            running.append(module)

    def leave(*_: Any) -> None:
        if get_ident() == thread:
            running.pop()

    def watched(name: str, method: Any) -> Any:
        kind = "conv_states" if "conv" in name else "recurrent_states"
        signature = inspect.signature(method)

        def noting(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            slot = None if name == "update" else StateSlot(given["layer_idx"], kind, given.get("state_idx", 0))
            asked.setdefault(running[-1], set()).add(slot)
            return method(*args, **kwargs)

        return noting

    hooks = []
    for name in ("update", "get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"):
        setattr(cache, name, watched(name, getattr(cache, name)))
    try:
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(enter))
            hooks.append(module.register_forward_hook(leave, always_call=True))
        yield asked
    finally:
        for hook in hooks:
            hook.remove()
