"""The identity of a target, as cheaply as every call can look: a trial that it passed holds while that is the same."""

from __future__ import annotations

from typing import Any

from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from hf_dart.models.attention import attention_of, registered
from hf_dart.models.devices import autocast_dtype, device_of
from hf_dart.models.running_states.tree_forward import forward_before
from hf_dart.models.support import parts_of


def identity(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return a key of a target's module kinds, code, hooks, modes, attention, dtype and adapters, and autocast.

    What that code reads (globals, attributes, closures) is not looked into: whoever changes it attaches again.
    """
    parts = parts_of(model)
    kinds = (*map(type, parts), *{type(part._parameters.get("weight")): None for part in parts})
    code = [getattr(kind, "forward", None) for kind in dict.fromkeys(kinds)]
    for part in parts:
        own_forward = forward_before(part)
        if part._forward_pre_hooks or part._forward_hooks or own_forward is not None:
            hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
            # Hooks of transformers, added by the first call that asks for hidden states, change nothing.
            own = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("transformers.")]
            code += map(_code_of, own)
            if own_forward is not None:
                code.append(_code_of(own_forward))
    adapters = frozenset(str(config.peft_type) for config in getattr(model, "peft_config", {}).values())
    modes, attention = tuple(part.training for part in parts), attention_of(model)
    code += [_code_of(registered(interface, attention)) for interface in (AttentionInterface, AttentionMaskInterface)]
    multiplied = autocast_dtype(device_of(model.get_input_embeddings()))
    return attention, model.dtype, multiplied, kinds, modes, tuple(code), adapters


def _code_of(function: Any) -> Any:
    """Code that does not change from call to call: a closure that is made for each of them is the same."""
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))
