"""Versions, hardware and command that a figure or a head was made with."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def versions(packages: Sequence[str] = ("torch", "transformers")) -> dict[str, str]:
    """Versions of Python, this package and others, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in ("hf-dart", *packages):
        with suppress(PackageNotFoundError):
            found[name] = torch.__version__ if name == "torch" else version(name)
    return found


def hardware(device: torch.device) -> str:
    """Return the name of an accelerator, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def circumstances(command: Sequence[str], device: torch.device, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Date, command, versions (those of more `packages`, too), hardware and threads of a measurement."""
    return {
        "date": date.today().isoformat(),
        "command": shlex.join(command),
        "versions": versions(("torch", "transformers", *packages)),
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
    }
