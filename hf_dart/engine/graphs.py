"""Launching a round: one CUDA graph, or a plain call where there is no CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

_WARM_UPS = 3
"""Calls before the capture: what is compiled, tuned or allocated on first use is so by then."""
_capturing = Lock()


class Launch:
    """A function of fixed shapes without arguments, launched as one CUDA graph where its device has them.

    A graph replays the kernels of one call on the addresses that they had: what the function works on stays where it
    is, is filled in before a launch and read behind it, and none of its Python runs again. Warm-up and capture call
    the function on what is there, so that has to be something that may be overwritten.

    Args:
        step: the function. It reads nothing back to the host.
        device: where it computes.
        pool: memory that graphs share, of `memory_pool`; they never run at the same time, and nothing that one leaves
            there is read by another.
    """

    def __init__(self, step: Callable[[], None], device: torch.device, pool: Any = None) -> None:
        self._launch = step
        if device.type == "cuda":
            self._launch = _captured(step, device, pool).replay
        else:
            step()

    def __call__(self) -> None:
        """Do it once more; on a GPU the host does not wait."""
        self._launch()


def memory_pool(device: torch.device) -> Any:
    """A pool for several `Launch`es; None where there are no graphs."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def _captured(step: Callable[[], None], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    with _capturing, torch.cuda.device(device), _without_cached_casts():
        # On a stream of its own, as PyTorch's notes on CUDA graphs ask for, and of this device: the one that
        # torch.cuda.graph would take is of whichever device was captured on first.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            step()
    return graph


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Let autocast cast anew: copies that it keeps are freed with its context, and a graph would go on reading them."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
