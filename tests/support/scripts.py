"""Test files that start themselves as programs of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])


def command(file: str, *words: str, processes: int = 0) -> list[str]:
    """Runs `file` with `words`; with `processes`, under torchrun in so many."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    return [sys.executable, *launch, file, *words]


def environment() -> dict[str, str]:
    """That of this process, in which `support` can be imported from every folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))}
