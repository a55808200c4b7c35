"""A CUDA device that is none: right numbers, from CPU tensors that say they lie on cuda:0.

It knows the rules by which the captured rounds live, and raises where CUDA would, or would go wrong without a word:

- an operation on tensors of the device and of the host;
- a question of the host (a number read, a copy, indices that are masks) while a graph is captured;
- a draw while a graph is captured.

A graph is a tape of the operations of its capture. A replay runs them again, on the memory that they had and without
any of the Python that led to them; what a capture itself has computed is undone at its end, as a capture runs nothing.
Kernels are those of the CPU. What compiles code for a GPU cannot run here.

    with simulated_gpu() as gpu:
        target.to("cuda")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, ClassVar, NamedTuple
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

needs_a_driver = pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles for a GPU, and runs what it made")
"""Marks a test that cannot run here."""

aten = torch.ops.aten
DEVICE = torch.device("cuda:0")

# What the host has to know before it can go on: numbers, and sizes that depend on numbers.
_NUMBERS = {"_local_scalar_dense", "equal", "is_nonzero"}
_READS = _NUMBERS | {"nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "unique_consecutive"}
_BY_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_"}
_TAKES_NUMBERS = {"fill_", "fill", "masked_fill", "masked_fill_", "index_fill", "index_fill_"}  # of the host
_UNFILLED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
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
        return _current().run(func, args, kwargs or {})

    def __repr__(self, **options: Any) -> str:
        return f"DeviceTensor({self.host!r})"

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


class SimulatedGpu:
    """What the device has done, and what it is doing.

    Attributes:
        launches: operations that were launched one by one, and `replays` of whole graphs.
        questions: of the host, by what was asked.
        attention: calls of attention on the device, as PyTorch chooses its kernel or of the "efficient" one by name.
        generator: the device's default one.
    """

    def __init__(self) -> None:
        self.launches = self.replays = 0
        self.questions: Counter[str] = Counter()
        self.attention: Counter[str] = Counter()
        self.generator = torch.Generator()
        self.graph: Graph | None = None  # that is being captured

    def ask(self, what: str) -> None:
        """The host waits for the device.

        Raises:
            RuntimeError: it must not, now.
        """
        if self.graph is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
        self.questions[what] += 1

    # ---- operations -----------------------------------------------------------------------------------------

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation of ATen whose arguments or results may lie on the device."""
        leaves = _tensors((args, kwargs))
        named = kwargs.get("device")
        if not any(isinstance(part, DeviceTensor) for part in leaves) and (named is None or named.type != "cuda"):
            return func(*args, **kwargs)
        kind = _kind_of(func)
        if kind.composite:  # as it comes here in inference mode
            with _Operations():
                return func.decompose(*args, **kwargs)
        if kind.name == "copy_" or kind.name in _BY_INDICES:
            self._check_transfer(func, kind.name, args, kwargs)
        else:
            _check_devices(func, kind, leaves)
        if kind.name in _READS:
            self.ask(str(func))
        if kind.draws:
            if self.graph is not None:
                raise RuntimeError(f"{func} draws while a graph is captured")
            if kwargs.get("generator") is None and kind.takes_generator:
                kwargs = {**kwargs, "generator": self.generator}
        if named is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is aten._scaled_dot_product_efficient_attention.default:
            self.attention["efficient"] += 1
            func = _efficient_attention
        on_host = _mapped(_host, args), _mapped(_host, kwargs)
        if kind.name in _NUMBERS or (kind.name == "copy_" and not isinstance(args[0], DeviceTensor)):
            return _as_given(func(*on_host[0], **on_host[1]), leaves, wrapped=False)
        if self.graph is None:
            self.launches += 1
            return _as_given(func(*on_host[0], **on_host[1]), leaves)
        return _as_given(self.graph.record(func, kind, *on_host), leaves)

    def _check_transfer(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """Copies and indices may cross from one to the other, for which the host waits."""
        if name == "copy_":
            into, source = args[0], args[1]
            if isinstance(into, DeviceTensor) != isinstance(source, DeviceTensor):
                self.ask(f"{func} between host and device")
            return
        places = [part for part in args[1] if part is not None]
        if not isinstance(args[0], DeviceTensor):
            raise RuntimeError(f"indices should be either on cpu or on the same device as the indexed tensor ({func})")
        if any(part.dtype in (torch.bool, torch.uint8) for part in places):
            self.ask(f"{func} with a mask")
        if not all(isinstance(part, DeviceTensor) for part in places):
            self.ask(f"{func} with indices of the host")
        if name != "index" and not isinstance(args[2], DeviceTensor) and args[2].dim():
            raise RuntimeError(f"Expected all tensors to be on the same device ({func})")

    def moved(self, tensor: Tensor, to: torch.device | None, options: dict[str, Any]) -> Tensor:
        """`tensor.to(to, ...)`, from one to the other or where it lies."""
        on_device = isinstance(tensor, DeviceTensor)
        goal = on_device if to is None else to.type == "cuda"
        if goal == on_device:
            return Tensor.to(tensor, **{"dtype": tensor.dtype, **options})
        self.ask("a copy between host and device")
        there = Tensor.to(_host(tensor).detach().clone(), **options)
        found: Any = DeviceTensor(there) if goal else there
        return found.requires_grad_() if tensor.requires_grad and tensor.is_leaf else found


class Graph:
    """A CUDA graph, as a tape of operations on the host's memory."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._tape: list[tuple[Any, Any, dict[str, Any], list[Tensor]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # what a capture wrote over, by its place

    def record(self, func: Any, kind: _Kind, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation for its result's place, and have it run by each replay."""
        if kind.writes:
            for part in _tensors((args, kwargs)):  # one of them; the others are small
                self._keep(part)
        found = func(*args, **kwargs)
        if not kind.views and kind.name not in _UNFILLED:  # a view is one for good
            self._tape.append((func, args, kwargs, [] if kind.writes else _tensors(found)))
        return found

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._before[storage.data_ptr()] = (whole, whole.clone())

    def end(self) -> None:
        """Undo what the capture has computed."""
        for whole, before in self._before.values():
            whole.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        gpu = _current()
        if gpu.graph is not None:
            raise RuntimeError("a graph is replayed while another one is captured")
        gpu.replays += 1
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            for func, args, kwargs, places in self._tape:
                found = func(*args, **kwargs)
                if places:
                    for place, part in zip(places, _tensors(found), strict=True):
                        place.copy_(part)


class _Kind(NamedTuple):
    """What is asked of an operation every time."""

    name: str
    composite: bool
    draws: bool
    takes_generator: bool
    takes_numbers: bool
    writes: bool
    views: bool


@cache
def _kind_of(func: Any) -> _Kind:
    schema, name = func._schema, func.overloadpacket.__name__
    given = [one.alias_info for one in schema.arguments if one.alias_info is not None]
    return _Kind(
        name,
        func._can_decompose(),
        # Attention may drop out, which is nothing that a decoder does.
        torch.Tag.nondeterministic_seeded in func.tags and not name.startswith("_scaled_dot_product"),
        any(one.name == "generator" for one in schema.arguments),
        torch.Tag.pointwise in func.tags or name in _TAKES_NUMBERS,
        any(info.is_write for info in given),
        any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns),
    )


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


def _check_devices(func: Any, kind: _Kind, tensors: list[Tensor]) -> None:
    """A tensor of the host beside those of the device may be a number of an elementwise operation, and no more."""
    for part in tensors:
        if not isinstance(part, DeviceTensor) and (part.dim() or not kind.takes_numbers):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"({func}, {tuple(part.shape)} on the host)"
            )


def _efficient_attention(
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,  # [B, H, Q, S]
    *_: Any,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the memory-efficient kernel computes, and what it refuses."""
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
        return _current().run(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """Calls of PyTorch's Python functions that would go to CUDA past the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(_current(), func, args, kwargs)
        named = kwargs.get("device")
        if named is not None and torch.device(named).type == "cpu":  # zeros_like(x, device="cpu")
            args = _mapped(_host, args)
        if isinstance(named, (str, int)):
            kwargs = {**kwargs, "device": torch.device(named)}
        return func(*args, **kwargs)


def _to(gpu: SimulatedGpu, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, *given = args
    options = dict(kwargs)
    like = options.pop("other", given[0] if given else None)
    if isinstance(like, Tensor):
        given = [like.device, like.dtype, *given[1:]]
    copied = {name: options.pop(name) for name in ("copy", "memory_format") if name in options}
    device, dtype, *_ = torch._C._nn._parse_to(*given, **options)
    return gpu.moved(tensor, device, {**copied, **({} if dtype is None else {"dtype": dtype})})


def _made(gpu: SimulatedGpu, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`torch.tensor` and its like: made on the host, and brought over."""
    named = kwargs.pop("device", None)
    given = args[0] if args else kwargs.get("data")
    if isinstance(given, DeviceTensor):
        return _to(gpu, func, (given,), {**kwargs, "device": named})
    found = func(*args, **kwargs)
    return found if named is None else gpu.moved(found, torch.device(named), {})


def _tolist(gpu: SimulatedGpu, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], DeviceTensor):
        gpu.ask("tolist")
    return func(_host(args[0]))


def _sdpa(gpu: SimulatedGpu, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0] if args else kwargs["query"], DeviceTensor):
        gpu.attention["as PyTorch chooses"] += 1
    return func(*args, **kwargs)


def _one_hot(gpu: SimulatedGpu, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, classes = args[0], args[1] if len(args) > 1 else kwargs["num_classes"]
    return (tensor[..., None] == torch.arange(classes, device=tensor.device)).long()  # as it is done on CUDA


_SPECIAL: dict[Any, Callable[..., Any]] = {
    Tensor.to: _to,
    Tensor.cpu: lambda gpu, func, args, kwargs: _to(gpu, func, (args[0], "cpu"), {}),
    Tensor.cuda: lambda gpu, func, args, kwargs: _to(gpu, func, (args[0], DEVICE), {}),
    Tensor.tolist: _tolist,
    torch.tensor: _made,
    torch.as_tensor: _made,
    torch.nn.functional.scaled_dot_product_attention: _sdpa,
    torch.nn.functional.one_hot: _one_hot,
}


@contextmanager
def _capture(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    gpu = _current()
    gpu.ask("the beginning of a capture")
    gpu.graph = graph
    try:
        yield
    finally:
        gpu.graph = None
        graph.end()


_running: list[SimulatedGpu] = []


def _current() -> SimulatedGpu:
    if not _running:
        raise RuntimeError("a tensor of the simulated GPU is used after its end")
    return _running[-1]


@contextmanager
def simulated_gpu() -> Iterator[SimulatedGpu]:
    """Let PyTorch have one CUDA device meanwhile, in this thread; a process has one at a time."""
    gpu, plain = SimulatedGpu(), torch.Generator

    stands_in: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: gpu.graph is not None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda device: nullcontext(),
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: Mock(),
        "set_stream": lambda stream: None,
        "synchronize": lambda device=None: None,
        "graph_pool_handle": lambda: (0, 1),
        "get_device_name": lambda device=None: "a simulated GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "get_rng_state": lambda device=None: gpu.generator.get_state(),
        "set_rng_state": lambda state, device=None: gpu.generator.set_state(state),
        "manual_seed_all": gpu.generator.manual_seed,
        "set_sync_debug_mode": lambda mode: None,  # a replay asks nothing here
        "Stream": lambda *args: Mock(),  # all run in the order of the program
        "CUDAGraph": Graph,
        "graph": _capture,
    }
    with (
        patch.multiple(torch.cuda, **stands_in),
        patch.object(torch, "Generator", lambda device="cpu": plain()),
    ):
        _running.append(gpu)
        # Parameters become others of the same identity: tied ones stay so.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with _Calls(), _Operations():
                yield gpu
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
            _running.pop()
