"""Test files that start themselves as programs of their own, and programs that are tested as modules."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

TESTS = str(Path(__file__).parents[1])


def command(file: str, *words: str, processes: int = 0) -> list[str]:
    """Runs `file` with `words`; with `processes`, under torchrun in so many."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    return [sys.executable, *launch, file, *words]


def environment() -> dict[str, str]:
    """That of this process, in which `support` can be imported from every folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))}


def experiment(name: str) -> ModuleType:
    """A file of `examples/experiments`, as a module that finds the others of that folder."""
    folder = str(Path(TESTS).parent / "examples" / "experiments")
    if folder not in sys.path:
        sys.path.append(folder)
    return import_module(name)
