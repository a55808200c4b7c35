"""Calls that are refused: one sentence, and no noise drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


def refused(call: Callable[[], Any], kind: type[Exception] | tuple[type[Exception], ...], words: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(kind, match=words) as error:
        call()
    message = str(error.value).strip()
    assert "\n" not in message, message
    assert message.endswith("."), message
    assert torch.equal(torch.get_rng_state(), state), "a refused call drew noise"
