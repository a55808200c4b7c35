"""Launching a round: one CUDA graph, or a plain call where there is no CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dart.engine.compiling import EngineConfig
from hf_dart.engine.memory import Memory

_WARM_UPS = 3
"""Calls before the capture: what is compiled, tuned or allocated on first use is so by then."""
_capturing = Lock()


class Pool(NamedTuple):
    """Memory that graphs share. What one stream gave back is given to no other, so they are captured on one."""

    handle: Any
    stream: torch.cuda.Stream


class Capture(NamedTuple):
    """Settings and memory with which rounds are captured.

    Attributes:
        config: by which they are compiled.
        pool: of graphs.
        memory: for keys and values.
    """

    config: EngineConfig
    pool: Pool | None
    memory: Memory


class Launch:
    """A function of fixed shapes without arguments, launched as one CUDA graph where its device has them.

    A graph replays the kernels of one call on the addresses that they had: what the function works on stays where it
    is, is filled in before a launch and read after it, and none of its Python runs again. Warm-up and capture call
    the function on what is there, so that has to be something that may be overwritten.

    Args:
        step: the function. It reads nothing back to the host.
        device: where it computes.
        pool: of `memory_pool`, None where there are no graphs; its graphs never run at the same time, and nothing that
            one leaves there is read by another.
        run_uncompiled: the same function, of which nothing is compiled. It is tried first, so that what cannot be
            captured is told before a capture is begun, which would leave PyTorch's generators and its allocator in the
            middle of one.

    Raises:
        RuntimeError: it asks the host for something.
    """

    def __init__(
        self,
        step: Callable[[], None],
        device: torch.device,
        pool: Pool | None,
        run_uncompiled: Callable[[], None],
    ) -> None:
        self._launch = step
        if pool is None:
            step()
            return
        run_uncompiled()  # tensors made on first use may come from the host
        with NoHost():
            run_uncompiled()
        self._launch = _captured(step, device, pool).replay

    def __call__(self) -> None:
        """Run the captured part once more; on a GPU the host does not wait."""
        self._launch()


class NoHost(TorchDispatchMode):
    """Mode in which an operation that reads a number back to the host, or brings one from there, raises a RuntimeError.

    As `torch.cuda.set_sync_debug_mode("error")`, but for this thread alone, and on a CPU too.
    """

    _READ = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, found = func.overloadpacket.__name__, self._inside(func, args, kwargs or {})
        if found is NotImplemented:
            found = func(*args, **(kwargs or {}))
        reads = name in self._READ
        if name in ("index", "index_put", "index_put_"):  # a mask's count is read; indices may come from the host
            places, here = [part for part in args[1] if part is not None], args[0].device
            reads = any(part.dtype in (torch.bool, torch.uint8) or part.device != here for part in places)
        if name in ("_to_copy", "copy_"):
            reads = found.device != (args[0] if name == "_to_copy" else args[1]).device
        if reads:
            raise RuntimeError(f"{func} asks the host for something, which a graph cannot")
        return found

    def _inside(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a composite operation, looking at its parts too, and return its result; NotImplemented if it has none.

        Of custom ones nothing is known by name, and what they call comes here before PyTorch has taken it apart.
        """
        tensors = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
        with self:
            found = func.decompose(*args, **kwargs)
            if found is NotImplemented and func.namespace not in ("aten", "prims") and tensors:
                # Straight to the device's kernel: called by its name, it would come here again.
                key = getattr(torch._C.DispatchKey, tensors[0].device.type.upper())
                found = func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        return found


def memory_pool(device: torch.device) -> Pool | None:
    """Return a pool for several `Launch`es; None where there are no graphs."""
    return Pool(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)) if device.type == "cuda" else None


def _captured(step: Callable[[], None], device: torch.device, pool: Pool) -> torch.cuda.CUDAGraph:
    with _capturing, torch.cuda.device(device), _without_cached_casts():
        # On a stream of its own, as PyTorch's notes on CUDA graphs ask for, and of this device: the one that
        # torch.cuda.graph would take is of whichever device was captured on first.
        stream, before = pool.stream, torch.cuda.current_stream()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step()
        before.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=pool.handle, stream=stream, capture_error_mode="thread_local"):
                step()
        finally:
            torch.cuda.set_stream(before)  # after a failed capture the thread is still on the capture's stream
    return graph


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Let autocast cast weights in each call: kept copies are freed with its context, and a graph would read them."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
