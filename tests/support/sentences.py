"""Errors are told in one sentence, and what is refused draws no noise."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_dart.cli import main


def refused(call: Callable[[], Any], kind: type[Exception] | tuple[type[Exception], ...], words: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(kind, match=words) as error:
        call()
    message = str(error.value).strip()
    assert "\n" not in message, message
    assert message.endswith("."), message
    assert torch.equal(torch.get_rng_state(), state), "a refused call drew noise"


def assert_command_says(words: list[str], says: str, shown: pytest.CaptureFixture[str]) -> None:
    """A command ends with 2, and one sentence on stderr alone."""
    assert main(words) == 2
    found = shown.readouterr()
    assert says in found.err
    assert found.err.startswith("hf-dart: ")
    assert found.err.count("\n") == 1
    assert not found.out


def not_read(read: Callable[[], Any], words: str) -> None:
    """Reading files fails with one sentence that has these words."""
    refused(read, (ValueError, OSError), re.escape(words))
