"""The identity of a target, and a block that leaves the target as it was.

A trial that a target passed holds while its identity is the same, which every call looks at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from hf_dart.models.attention import attention_of, registered
from hf_dart.models.devices import autocast_dtype, device_of
from hf_dart.models.forwards import forward_before
from hf_dart.models.support import parts_of

_STAY = {"forward", "_output_capturing_hooks_installed"}
_told: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # how often `changed` was called


def changed(model: PreTrainedModel) -> None:
    """Give a target another identity, as what its code reads may have changed."""
    _told[model] = _told.get(model, 0) + 1


def identity(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return a key of a target's module kinds, code, hooks, modes, attention, device, dtype and adapters, and autocast.

    What that code reads (globals, attributes, closures) is not looked into: whoever changes it attaches again, which
    changes the key, too.
    """
    parts = parts_of(model)
    kinds = (*map(type, parts), *{type(part._parameters.get("weight")): None for part in parts})
    code = [getattr(kind, "forward", None) for kind in dict.fromkeys(kinds)]
    for part in parts:
        own_forward = forward_before(part)
        if part._forward_pre_hooks or part._forward_hooks or own_forward is not None:
            code += map(_code_of, users_hooks(part))
            if own_forward is not None:
                code.append(_code_of(own_forward))
    adapters = frozenset(str(config.peft_type) for config in getattr(model, "peft_config", {}).values())
    modes, attention = tuple(part.training for part in parts), attention_of(model)
    code += [_code_of(registered(interface, attention)) for interface in (AttentionInterface, AttentionMaskInterface)]
    device = device_of(model.get_input_embeddings())
    told = _told.get(model, 0)
    return told, attention, device, model.dtype, autocast_dtype(device), kinds, modes, tuple(code), adapters


def users_hooks(part: nn.Module) -> list[Any]:
    """Return a module's hooks but those of transformers, added where hidden states are asked for, which do nothing."""
    hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("transformers.")]


def _code_of(function: Any) -> Any:
    """Code that does not change from call to call: a closure that is made for each of them is the same."""
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Put back the buffers, attributes and parts of all modules that the block has replaced, added or written into.

    Rotary frequencies, for one, may follow the longest text that a model was ever run on. Buffers that are saved with
    the weights are put back where they were replaced, and not copied. Forwards of instances stay: other threads put
    them in place, and take them away; so does transformers' mark of a model whose hidden states hooks collect, as the
    hooks stay. A block in which weights were replaced leaves all as it is: the first forward of a model may unpack its
    weights (compressed-tensors does), and is not to be undone by half.
    """
    parts = list(model.modules())
    held = [(members, dict(members)) for part in parts for members in (vars(part), part._buffers, part._modules)]
    weights = [(part._parameters, dict(part._parameters)) for part in parts]
    copies = [
        (buffer, buffer.clone())
        for part in parts
        for name, buffer in part._buffers.items()
        if name in part._non_persistent_buffers_set and buffer is not None and not buffer.is_meta
    ]
    try:
        yield
    finally:
        if not any(_replaced(now, before) for now, before in weights):
            for now, before in held:
                for name in now.keys() - before.keys() - _STAY:
                    del now[name]
                for name, value in before.items():
                    if name not in _STAY and now.get(name, now) is not value:
                        now[name] = value
            with torch.no_grad():
                for buffer, content in copies:
                    if not torch.equal(buffer, content):
                        buffer.copy_(content)


def _replaced(now: Any, before: dict[str, Any]) -> bool:
    """Return True if weights were replaced. Offloaded ones are on "meta" between forwards, each time a new tensor."""
    return now.keys() != before.keys() or any(
        now[name] is not weight and not (weight is not None and weight.is_meta) for name, weight in before.items()
    )
