"""How much memory something takes, measured so that the rest of the process does not count.

What another thread, an import or a cache takes meanwhile, it takes once; what the thing itself takes, it takes
every time. So the least of a few runs is the thing's own.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import psutil
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RUNS = 3


def resident() -> int:
    """Bytes of memory that this process holds."""
    return psutil.Process().memory_info().rss


def traced_peak(work: Callable[[], Any]) -> int:
    """Bytes that Python and numpy hold at most while ``work`` runs; it runs `RUNS` times."""
    peaks = []
    for _ in range(RUNS):
        tracemalloc.start()
        work()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return min(peaks)


class TensorPeak(TorchDispatchMode):
    """Most bytes at once, in `peak`, of tensors that are `held` before or made inside, as large as `least` bytes."""

    def __init__(self, held: Iterable[Tensor], least: int) -> None:
        super().__init__()
        self.peak, self._least = 0, least
        self._alive: dict[StorageWeakRef, int] = {}
        self._count(held)

    def _count(self, tensors: Iterable[Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage.nbytes() >= self._least:
                self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._alive = {storage: size for storage, size in self._alive.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._count(one for one in tree_leaves(out) if isinstance(one, Tensor))
        return out


class Largest(TorchDispatchMode):
    """The most elements of any tensor that operators return, of those that count."""

    def __init__(self, counts: Callable[[Tensor], bool] = lambda _: True) -> None:
        super().__init__()
        self.counts, self.elements = counts, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, Tensor) and one.ndim and self.counts(one):
                self.elements = max(self.elements, one.numel())
        return result
