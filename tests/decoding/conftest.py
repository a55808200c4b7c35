"""The target and the head of most tests here."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny import prompts, tiny_head, tiny_target

from hf_dart import DartHead


@pytest.fixture
def target() -> Any:
    model = tiny_target("qwen3")
    # The first plain call that asks for hidden states installs transformers' own recording hooks for good.
    model(prompts([7])["input_ids"], output_hidden_states=True)
    return model


@pytest.fixture
def head(target: Any) -> DartHead:
    return tiny_head(target)
