"""Peak memory of a stretch of work."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """Begin a stretch."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _RESET.exists():
        with suppress(OSError):  # where the system forbids it, the peak is that of the process
            _RESET.write_text("5")  # see proc(5): resets the peak resident set size


def peak_bytes(device: torch.device) -> int:
    """Most memory in use since `reset_peak`: allocated on a CUDA device, else resident; 0 where that is not told."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    found = re.search(r"VmHWM:\s+(\d+)", _STATUS.read_text()) if _STATUS.exists() else None
    return 1024 * int(found[1]) if found else 0
