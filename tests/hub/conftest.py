"""A Hub on this machine (`support/hub.py`), and a target and head to push to it."""

from __future__ import annotations

from typing import Any

import pytest
from support.hub import alice as alice
from support.hub import hub as hub
from support.tiny import tiny_head, tiny_target

from hf_dart import DartHead


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The client hands httpx the bytes of an upload by an old name.
    for item in items:
        if "alice" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"))


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("llama")


@pytest.fixture(scope="module")
def head(target: Any) -> DartHead:
    return tiny_head(target)
