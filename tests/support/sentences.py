"""Errors are told in one sentence."""

from __future__ import annotations

import pytest


def one_sentence(error: pytest.ExceptionInfo[BaseException]) -> str:
    message = str(error.value)
    assert "\n" not in message.strip(), message
    assert message.strip().endswith("."), message
    return message
