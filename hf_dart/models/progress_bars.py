"""Progress bars of transformers, switched off for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers from showing progress bars inside: for files that are read in less than a second."""
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    if are_progress_bars_disabled() or not logging.is_progress_bar_enabled():  # leave them as they are
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
