"""Devices of a target's modules, which drafters read through, and of our bookkeeping; weights, dtypes, generators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeGuard, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.models.features import lm_head_of, table_of

Function = TypeVar("Function", bound=Callable[..., Any])

_WHOLE, _LONGEST = 16, 1 << 16  # rows of a weight that are looked at as they are, and words of each
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # that the bits of a weight are read as, if they fit

# The device that `torch.set_default_device` named, while our own bookkeeping is on the CPU.
_named: ContextVar[torch.device | None] = ContextVar("_named", default=None)


def host_by_default(function: Function) -> Function:
    """Put what `function` makes without naming a device on the CPU, whatever `torch.set_default_device` says."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        named = torch.get_default_device()
        if named.type == "cpu":  # the context would slow down every torch call
            return function(*args, **kwargs)
        token = _named.set(named)
        try:
            with torch.device("cpu"):
                return function(*args, **kwargs)
        finally:
            _named.reset(token)

    return run  # type: ignore[return-value]


def users_default() -> AbstractContextManager[Any]:
    """Return the default device that the user's own code counts on, also inside of `host_by_default`."""
    named = None if torch.compiler.is_compiling() else _named.get()
    return nullcontext() if named is None else named


def matmul_precision() -> tuple[str, ...]:
    """Return the precision of float32 matrix products that PyTorch is set to, on GPUs and on the CPU.

    Once a switch of one backend was used, the getter for all of them raises.
    """
    backends: Any = torch.backends
    return backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision


def device_of(module: Any) -> torch.device:
    """Return the device that a module with a weight runs on. Between calls an offloaded weight lies on "meta"."""
    weight = module.weight
    if not weight.is_meta or not hasattr(module, "_hf_hook"):
        return weight.device
    return torch.device(_hook(module).execution_device)


def is_part(weight: Any) -> bool:
    """Tell a weight of which other processes hold the rest, as with tensor parallelism."""
    return hasattr(weight, "full_tensor")


def weight_of(module: Any) -> Tensor:
    """Return a module's weight; read it from where it is offloaded, gather its parts from their processes."""
    weight = module.weight
    if is_part(weight):
        return weight.full_tensor()
    if not weight.is_meta or not hasattr(module, "_hf_hook"):
        return weight
    return _hook(module).weights_map["weight"]


def state_of(weight: Any) -> tuple[Any, ...]:
    """Return a key that changes with a weight's values; weights made in inference mode do not count their changes."""
    version = 0 if weight.is_inference() else weight._version
    return id(weight), version, weight.shape, weight.device, weight.dtype


def contents_of(weights: Iterable[Tensor]) -> list[tuple[int, ...]]:
    """Keys that change with the values of weights, whoever writes to them; each weight is read once.

    Fused optimizers and writes to `.data` change no version. Sums of rows tell all but the order within rows, which is
    looked at in `_WHOLE` of them: what changes places in every row shows. Weights on "meta", or of subclasses, have
    their versions alone.
    """
    found = list[tuple[int, ...]]()
    for weight in weights:
        known = weight.data_ptr() if not weight.is_meta else 0, 0 if weight.is_inference() else weight._version
        if weight.is_meta or type(weight) not in (Tensor, nn.Parameter) or not weight.numel():
            found.append(known)
            continue
        flat, size = weight.detach().contiguous().view(-1), weight.itemsize
        row = weight[0].numel() * size if weight.dim() > 1 else size
        fits = (word for word in _WORDS if not (row % word.itemsize or flat.storage_offset() * size % word.itemsize))
        rows = flat.view(next(fits)).view(len(weight) if weight.dim() else 1, -1)
        whole = rows[:: max(1, len(rows) // _WHOLE), :_LONGEST]
        parts = (rows.sum(1, dtype=torch.int64), whole)
        found.append((*known, *(hash(part.cpu().numpy().tobytes()) for part in parts)))
    return found


def has_rows(lm_head: Any) -> TypeGuard[nn.Linear]:
    """Tell whether rows of an LM head's weight can be read: not of quantized, adapted, offloaded and parted ones."""
    return type(lm_head) is nn.Linear and not lm_head.weight.is_meta and not is_part(lm_head.weight)


def rows_of(embeddings: Any, tokens: Tensor) -> Tensor:
    """Rows [..., E] of an embedding table, of token ids [...], without factors that some families put after it."""
    if type(embeddings) is nn.Embedding:
        return embeddings(tokens.to(device_of(embeddings)))
    table = weight_of(embeddings)
    return F.embedding(tokens.to(table.device), table)


def _hook(module: Any) -> Any:
    """Return the hook of accelerate that brings the weight in; there may be other hooks."""
    hook = module._hf_hook
    return next(one for one in getattr(hook, "hooks", (hook,)) if hasattr(one, "execution_device"))


def where_it_runs(module: Any, x: Tensor) -> Tensor:
    """`module(x)` on the module's device, and what comes out on that of x: a target may lie on several."""
    return module(x.to(device_of(module))).to(x.device)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype in which autocast multiplies matrices on a device now; None outside it."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def as_dtype(dtype: torch.dtype | str | None) -> Any:
    """Return the dtype that a name such as "bfloat16" stands for; "auto" and None stay, as in `from_pretrained`."""
    if dtype in (None, "auto") or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}; give one of torch's, such as torch.bfloat16, its name, or 'auto'.")
    return found


def generator_state(device: torch.device) -> Tensor:
    """Return the state of a device's default generator, [bytes] uint8."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Put a device's default generator into a state of [`generator_state`]."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


class TargetModules:
    """The target's modules that a drafter reads through; copies of the drafter share them."""

    decoder: Any = None  # of the target, for drafters that run parts of its layers

    def __init__(self, target: PreTrainedModel) -> None:
        self.embeddings = target.get_input_embeddings()
        self.lm_head = lm_head_of(target)
        # Rows of these, and of those of other targets that the drafter fits: deep copies, and wrappers by PEFT.
        self.compatible = WeakKeyDictionary[nn.Module, int]()
        self.take((self.embeddings, self.lm_head))

    def take(self, modules: Sequence[nn.Module]) -> None:
        """Take note of embeddings and LM head that the drafter fits."""
        self.compatible.update(dict.fromkeys(modules, table_of(modules[0]).num_embeddings))

    def fits(self, modules: Sequence[nn.Module]) -> bool:
        """Tell whether the drafter is known to fit these embeddings and this LM head, as they are now."""
        rows = table_of(modules[0]).num_embeddings
        return all(self.compatible.get(module) == rows for module in modules)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...] to the target's embeddings [..., E], on its device."""
        return self.embeddings(tokens.to(device_of(self.embeddings)))

    def rows(self, vocab_size: int) -> int:
        """Return how many of a drafter's V tokens the target knows; tables may differ in padding rows."""
        scored = getattr(self.lm_head, "out_features", vocab_size)
        return min(vocab_size, table_of(self.embeddings).num_embeddings, scored)

    def __deepcopy__(self, memo: dict[int, Any]) -> TargetModules:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the target out of a pickled drafter: its modules are no part of it, and `bind` lends them again."""
        return type(None), ()
