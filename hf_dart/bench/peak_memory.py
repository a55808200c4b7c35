"""Peak memory of a stretch of work."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """Begin a stretch; where the system keeps no resettable peak, `peak_bytes` is that of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _RESET.exists():
        try:
            _RESET.write_text("5")  # see proc(5): resets the peak resident set size
        except OSError:
            return


def peak_bytes(device: torch.device) -> int:
    """Most memory in use since `reset_peak`: allocated on a CUDA device, else resident in the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
