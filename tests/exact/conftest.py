"""A target and its head."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny import tiny_head, tiny_target


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    """A target and its head."""
    target = tiny_target("llama")
    return target, tiny_head(target)
