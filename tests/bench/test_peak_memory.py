"""Peak memory of a stretch of work."""

from __future__ import annotations

import torch
from support.memory import resident

from hf_dart.bench.peak_memory import peak_bytes, reset_peak


def test_peak_memory_is_seen() -> None:
    device = torch.device("cpu")
    reset_peak(device)
    before = peak_bytes(device)
    # More than the process ever held: not every system lets the peak be reset.
    block = torch.ones((before - resident() + 64 * 2**20) // 4)
    assert peak_bytes(device) - before > 32 * 2**20
    del block
