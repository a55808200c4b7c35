"""The executor of a test's rounds: called as they are, or with their parts on fixed shapes."""

from __future__ import annotations

from typing import Any

import pytest
from support.engines import Everywhere
from support.tiny import tiny_head, tiny_target

from hf_dart.drafters.base import Drafter


@pytest.fixture(params=["called", "captured"])
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test in both executors: on fixed shapes whatever can run there, uncompiled."""
    if request.param == "captured":
        monkeypatch.setattr(Drafter, "engine", Everywhere())
    return str(request.param)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    """A target and its head."""
    target = tiny_target("llama")
    return target, tiny_head(target)
