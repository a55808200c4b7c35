"""The target of most tests here."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("qwen3")
