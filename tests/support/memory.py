"""How much memory something takes, measured so that the rest of the process does not count.

What another thread, an import or a cache takes meanwhile, it takes once; what the thing itself takes, it takes
every time. So the least of a few runs is the thing's own.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import psutil

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
