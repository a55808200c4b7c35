"""Folders that are there whole or not at all: written under another name, then renamed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

STAGING = ".incomplete"
"""Folder of a run for checkpoints that are being written; what is found there was never finished."""


def publish(written: Path, final: Path) -> None:
    """Give a folder that is completely written its name; a folder that had the name is replaced.

    Args:
        written: on the file system of `final`.
        final: the name under which it may be loaded.
    """
    for path in [*written.rglob("*"), written]:
        _flush(path)
    if final.exists():
        # No system renames onto a folder that is not empty. Between the two renames neither folder has the name.
        replaced = written.with_name(f"{final.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        written.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        written.rename(final)
    _flush(final.parent)


def _flush(path: Path) -> None:
    """Have the system write a file or a folder's entries to the disk."""
    if os.name == "nt" and path.is_dir():  # folders cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
