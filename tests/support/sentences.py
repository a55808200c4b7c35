"""Errors are told in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


def one_sentence(error: pytest.ExceptionInfo[BaseException]) -> str:
    message = str(error.value)
    assert "\n" not in message.strip(), message
    assert message.strip().endswith("."), message
    return message


def refused(read: Callable[[], Any], words: str) -> None:
    """Reading files fails with one sentence that has these words."""
    with pytest.raises((ValueError, OSError), match=re.escape(words)) as error:
        read()
    one_sentence(error)
