"""Compiling and launching a part of a round: one CUDA graph, or a plain call where there is no CUDA; shared memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Lock, get_ident
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from hf_dart.cache.slot_cache import Zeros

_WARM_UPS = 3  # calls before the capture: what is compiled, tuned or allocated on first use is so by then
_capturing = Lock()


@dataclass(frozen=True)
class EngineConfig:
    """Options for compiling and capturing parts of a round.

    Args:
        backend: of `torch.compile`; None compiles nothing, which starts at once. On a GPU each part is one CUDA graph
            either way.
        first_tier: T of the shortest tier, in tokens; each is twice as long as the one before.

    Raises:
        ValueError: a field is out of range.
    """

    backend: str | None = "inductor"
    first_tier: int = 512

    def __post_init__(self) -> None:
        if self.first_tier < 8 or self.first_tier % 8:
            raise ValueError(f"first_tier is {self.first_tier}; give a multiple of 8 tokens.")


def compiled(part: Any, config: EngineConfig) -> Callable[..., Any]:
    """Compile a method as one graph; return it as it is where nothing is to be compiled."""
    if config.backend is None:
        return part
    # Dynamo limits compilations per code object: one code object for all tiers would soon exceed the limit.
    code, name = part.__func__.__code__.replace(), part.__name__
    own = FunctionType(code, part.__func__.__globals__, name, part.__func__.__defaults__, part.__func__.__closure__)
    whole = MethodType(own, part.__self__)
    # `engine.signature` says when parts are to be compiled again; guards would look at every weight in every round.
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    return torch.compile(whole, fullgraph=True, backend=config.backend, options=options, dynamic=False)


class Capture:
    """Settings and memory with which parts of rounds are captured: of graphs, where there are any, and of buffers.

    Each buffer is as large as the largest of its name that was asked for; the others are views of it. One tier is
    loaded at a time, and what it holds is put there as it is loaded. So keys and values of tiers that differ in their
    trees or rows lie in one place. A tier twice as long needs a larger buffer, while those in use stay where they are:
    graphs know them by their addresses.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._config = config
        # What one stream gave back to the pool is given to no other, so all graphs are captured on this one.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool: Any = None if self._stream is None else torch.cuda.graph_pool_handle()
        self._largest: dict[tuple[str, str, torch.dtype, torch.device], Tensor] = {}

    def memory_of(self, owner: str) -> Zeros:
        """Return what makes the owner's buffers by name, of zeros; others of that name may be written over."""

        def zeros(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
            key, size = (owner, name, dtype, device), torch.Size(shape).numel()
            flat = self._largest.get(key)
            if flat is None or flat.numel() < size:
                flat = self._largest[key] = torch.empty(size, dtype=dtype, device=device)
            return flat[:size].view(shape).zero_()

        return zeros

    def launched(self, step: Callable[[Any], None], run: Callable[..., Any]) -> Callable[[], None]:
        """Return what launches `step(run)`, its `run` compiled, on fixed shapes: as one CUDA graph where there are any.

        A graph replays the kernels of one call on the addresses that they had: what the function works on stays where
        it is, is filled in before a launch and read after it, and none of its Python runs again. Warm-up and capture
        call the function on what is there, so that has to be something that may be overwritten. The host does not wait.
        What is not compiled is tried first, and refused if it asks the host for something: a capture that fails would
        leave PyTorch's generators and its allocator in the middle of one. Graphs never run at the same time.
        """
        whole = partial(step, compiled(run, self._config))
        if self._stream is None:
            whole()
            return whole
        step(run)  # tensors made on first use may come from the host
        before, told = torch.cuda.get_sync_debug_mode(), list[tuple[int, str]]()
        with _capturing, warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_: told.append((get_ident(), str(message)))
            torch.cuda.set_sync_debug_mode("warn")  # of all threads, which an error would stop
            try:
                step(run)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        if any(thread == get_ident() and "synchronizing CUDA operation" in one for thread, one in told):
            raise RuntimeError("it asks the host for something, which a graph cannot")
        return self._captured(whole, self._stream).replay

    def _captured(self, step: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        cached = torch.is_autocast_cache_enabled()
        with _capturing, torch.cuda.device(stream.device):
            # On a stream of its own, as PyTorch's notes on CUDA graphs ask for, and of this device: the one that
            # torch.cuda.graph would take is of whichever device was captured on first.
            before = torch.cuda.current_stream()
            # Copies of weights that autocast keeps are freed with its context, and a graph would read them.
            torch.set_autocast_cache_enabled(False)
            try:
                stream.wait_stream(before)
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UPS):
                        step()
                before.wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                # Other threads may use the device meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    step()
            finally:
                torch.cuda.set_stream(before)  # after a failed capture the thread is still on the capture's stream
                torch.set_autocast_cache_enabled(cached)
        return graph
