"""A CUDA device that is none: right numbers, from CPU tensors that say they lie on cuda:0.

It knows where tensors lie, and raises where CUDA would: in an operation on tensors of the device and of the host, and
for operands that a kernel does not take. Kernels are those of the CPU. Nothing is compiled for it, and no graphs are
captured.

    with simulated_gpu():
        target.to("cuda")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

needs_a_driver = pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles or captures for a GPU")
"""Marks a test that cannot run here."""

aten = torch.ops.aten
DEVICE = torch.device("cuda:0")

# What comes out is a number of the host.
_NUMBERS = {"_local_scalar_dense", "equal", "is_nonzero"}
_BY_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_"}
_TAKES_NUMBERS = {"fill_", "fill", "masked_fill", "masked_fill_", "index_fill", "index_fill_"}  # of the host
_EFFICIENT = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of the memory-efficient kernel


class DeviceTensor(Tensor):
    """A tensor that says it lies on cuda:0; `host` holds its numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        # To PyTorch's C++ it lies on the CPU, whose builds know no other device; to Python it does not.
        made: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype
        )
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl
    device: ClassVar[Any] = property(lambda self: DEVICE)
    is_cuda: ClassVar[Any] = property(lambda self: True)
    is_cpu: ClassVar[Any] = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


_generators: list[torch.Generator] = []
"""The default one of the device, while there is one."""


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation of ATen whose arguments or results may lie on the device."""
    leaves = _tensors((args, kwargs))
    named = kwargs.get("device")
    if not any(isinstance(part, DeviceTensor) for part in leaves) and (named is None or named.type != "cuda"):
        return func(*args, **kwargs)
    name, composite, draws, _ = _kind_of(func)
    if composite:  # as it comes here in inference mode
        with _Operations():
            return func.decompose(*args, **kwargs)
    _check_devices(func, args, leaves)
    if draws and kwargs.get("generator") is None:
        kwargs = {**kwargs, "generator": _generators[-1]}
    if named is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func is aten._scaled_dot_product_efficient_attention.default:
        func = _efficient_attention
    found = func(*_mapped(_host, args), **_mapped(_host, kwargs))
    into_host = name == "copy_" and not isinstance(args[0], DeviceTensor)
    return _as_given(found, leaves, wrapped=name not in _NUMBERS and not into_host)


def _moved(tensor: Tensor, to: torch.device | None, options: dict[str, Any]) -> Tensor:
    """`tensor.to(to, ...)`, from one to the other or where it lies."""
    on_device = isinstance(tensor, DeviceTensor)
    goal = on_device if to is None else to.type == "cuda"
    if goal == on_device:
        return Tensor.to(tensor, **{"dtype": tensor.dtype, **options})
    there = Tensor.to(_host(tensor).detach().clone(), **options)
    found: Any = DeviceTensor(there) if goal else there
    return found.requires_grad_() if tensor.requires_grad and tensor.is_leaf else found


@cache
def _kind_of(func: Any) -> tuple[str, bool, bool, bool]:
    """An operation's name, and whether it is made of others, draws noise, and takes numbers of the host."""
    schema, name = func._schema, func.overloadpacket.__name__
    draws = torch.Tag.nondeterministic_seeded in func.tags and any(one.name == "generator" for one in schema.arguments)
    return name, func._can_decompose(), draws, torch.Tag.pointwise in func.tags or name in _TAKES_NUMBERS


def _mapped(change: Callable[[Any], Any], part: Any) -> Any:
    """Arguments or results with `change` made to what is no list, tuple or dictionary; PyTorch's own takes longer."""
    if isinstance(part, dict):
        return {name: _mapped(change, one) for name, one in part.items()}
    if isinstance(part, (list, tuple)):
        made = [_mapped(change, one) for one in part]
        return type(part)(*made) if hasattr(part, "_fields") else type(part)(made)
    return change(part)


def _tensors(part: Any) -> list[Tensor]:
    """Those among arguments or results."""
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, dict):
        part = part.values()
    elif not isinstance(part, (list, tuple)):
        return []
    return [found for one in part for found in _tensors(one)]


def _host(part: Any) -> Any:
    return part.host if isinstance(part, DeviceTensor) else part


def _as_given(found: Any, given: list[Tensor], wrapped: bool = True) -> Any:
    """Results as tensors of the device; one that is an argument's own numbers as that argument."""
    own = {id(part.host): part for part in given if isinstance(part, DeviceTensor)}

    def outer(part: Any) -> Any:
        if id(part) in own:
            return own[id(part)]
        return DeviceTensor(part) if wrapped and isinstance(part, Tensor) else part

    return _mapped(outer, found)


def _check_devices(func: Any, args: Any, tensors: list[Tensor]) -> None:
    """Raise where CUDA does for tensors of the host.

    Copies may cross, indices of the device's tensors may come from the host, and a tensor of one number may be one of
    an elementwise operation.
    """
    name, _, _, takes_numbers = _kind_of(func)
    if name == "copy_":
        return
    if name in _BY_INDICES:
        if not isinstance(args[0], DeviceTensor):
            raise RuntimeError(f"indices should be either on cpu or on the same device as the indexed tensor ({func})")
        tensors, takes_numbers = [] if name == "index" else [args[2]], True
    for part in tensors:
        if not isinstance(part, DeviceTensor) and (part.dim() or not takes_numbers):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"({func}, {tuple(part.shape)} on the host)"
            )


def _efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *_: Any, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the memory-efficient kernel computes of [B, H, Q, D] with a bias [B, H, Q, S], and what it refuses."""
    if query.dtype not in _EFFICIENT or {key.dtype, value.dtype} != {query.dtype}:
        raise RuntimeError(f"efficient attention of {query.dtype}, {key.dtype}, {value.dtype}")
    if query.shape[:2] != key.shape[:2] or key.shape[:3] != value.shape[:3]:
        raise RuntimeError("efficient attention needs as many heads of keys and values as of queries")
    fits = 16 // query.itemsize
    for part in (query, key, value):
        if part.shape[-1] % fits or part.stride(-1) != 1 or any(step % fits for step in part.stride()[:-1]):
            raise RuntimeError("efficient attention: an operand is not correctly aligned")
    if bias is not None:
        if bias.dtype != query.dtype:
            raise RuntimeError(f"invalid dtype for bias - should match query's dtype, {query.dtype}")
        if bias.shape != (*query.shape[:3], key.shape[2]):
            raise RuntimeError(f"efficient attention: a bias of {tuple(bias.shape)}")
        steps = [step for step, size in zip(bias.stride()[:-1], bias.shape[:-1], strict=True) if size > 1]
        if bias.stride(-1) != 1 or any(step % fits for step in steps) or bias.storage_offset() % fits:
            raise RuntimeError("attn_bias is not correctly aligned (strideM)")
    mixed = torch._scaled_dot_product_attention_math(query, key, value, bias, scale=scale)[0]
    none = query.new_empty(0)
    return mixed, none, none.long(), none.long()


class _Operations(TorchDispatchMode):
    """Operations that make tensors on the device from nothing, or work on some."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """Calls of PyTorch's Python functions that would go to CUDA past the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs)
        named = kwargs.get("device")
        if named is not None and torch.device(named).type == "cpu":  # zeros_like(x, device="cpu")
            args = _mapped(_host, args)
        if isinstance(named, (str, int)):
            kwargs = {**kwargs, "device": torch.device(named)}
        return func(*args, **kwargs)


def _to(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, *given = args
    options = dict(kwargs)
    like = options.pop("other", given[0] if given else None)
    if isinstance(like, Tensor):
        given = [like.device, like.dtype, *given[1:]]
    copied = {name: options.pop(name) for name in ("copy", "memory_format") if name in options}
    device, dtype, *_ = torch._C._nn._parse_to(*given, **options)
    return _moved(tensor, device, {**copied, **({} if dtype is None else {"dtype": dtype})})


def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`torch.tensor` and its like: made on the host, and brought over."""
    named = kwargs.pop("device", None)
    given = args[0] if args else kwargs.get("data")
    if isinstance(given, DeviceTensor):
        return _to(func, (given,), {**kwargs, "device": named})
    found = func(*args, **kwargs)
    return found if named is None else _moved(found, torch.device(named), {})


def _one_hot(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, classes = args[0], args[1] if len(args) > 1 else kwargs["num_classes"]
    return (tensor[..., None] == torch.arange(classes, device=tensor.device)).long()  # as it is done on CUDA


def _causal(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Attention whose causal mask PyTorch's C++ would make on the host."""
    leaves = _tensors((args, kwargs))
    if not (kwargs.get("is_causal") and all(isinstance(part, DeviceTensor) for part in leaves)):
        return func(*args, **kwargs)
    return _as_given(func(*_mapped(_host, args), **_mapped(_host, kwargs)), leaves)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    Tensor.to: _to,
    Tensor.cpu: lambda func, args, kwargs: _to(func, (args[0], "cpu"), {}),
    Tensor.cuda: lambda func, args, kwargs: _to(func, (args[0], DEVICE), {}),
    Tensor.tolist: lambda func, args, kwargs: func(_host(args[0])),
    torch.tensor: _made,
    torch.as_tensor: _made,
    torch.nn.functional.one_hot: _one_hot,
    torch.nn.functional.scaled_dot_product_attention: _causal,
}


@contextmanager
def simulated_gpu() -> Iterator[None]:
    """Let PyTorch have one CUDA device meanwhile, in this thread; a process has one at a time."""
    generator, plain = torch.Generator(), torch.Generator
    stands_in: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda device: nullcontext(),
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "manual_seed_all": generator.manual_seed,
    }
    with (
        patch.multiple(torch.cuda, **stands_in),
        patch.object(torch, "Generator", lambda device="cpu": plain()),
    ):
        _generators.append(generator)
        # Parameters become others of the same identity: tied ones stay so.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with _Calls(), _Operations():
                yield
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
            _generators.pop()
