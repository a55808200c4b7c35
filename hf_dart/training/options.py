"""One option of a run: a field of a dataclass that `HfArgumentParser` makes a flag of."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any


def option(default: Any, words: str, **flag: Any) -> Any:
    """Make a field of its default (MISSING has to be given), what `--help` says of it, and more for `argparse`."""
    metadata = {"help": words, **flag}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)
