"""Calls that are refused: one sentence, and no noise drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.compare import assert_identical
from support.outcome import snapshot
from support.tiny import prompts

ROUTES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "assistant": lambda drafter: {"assistant": drafter},
    "custom_generate": lambda drafter: {"custom_generate": drafter.generate},
}


def refused(call: Callable[[], Any], kind: type[Exception] | tuple[type[Exception], ...], words: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(kind, match=words) as error:
        call()
    message = str(error.value).strip()
    assert "\n" not in message, message
    assert message.endswith("."), message
    assert torch.equal(torch.get_rng_state(), state), "a refused call drew noise"


SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 16}
INPUTS = prompts([7])
RIGHT_PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 3, "do_sample": False}, "num_beams"),
    "stock's own drafts": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "multi-token prediction": ({"use_mtp": True}, "use_mtp"),
    "sampled beams": ({"num_beams": 2}, "num_beams"),
    "no cache": ({"use_cache": False}, "use_cache"),
    "offloaded": ({"cache_implementation": "offloaded"}, "cache"),
    "offloaded static": ({"cache_implementation": "offloaded_static"}, "cache"),
    "attentions": ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
    "some hidden states": ({"return_dict_in_generate": True, "output_hidden_states": [0, 1]}, "output_hidden_states"),
    "right padding": (RIGHT_PADDED, "left"),
    "a hole in the mask": ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]])}, "left"),
    "a row of padding": ({**prompts([3, 3]), "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "padding"),
    "an empty prompt": ({"input_ids": torch.zeros(1, 0, dtype=torch.long), "attention_mask": None}, "empty"),
    "no rows": ({name: value[:0] for name, value in INPUTS.items()}, "one row"),
    "ids that are no integers": ({"input_ids": INPUTS["input_ids"].float()}, "long"),
    # Stock then runs over the ids where there are embeddings too.
    "an assistant": ({"is_assistant": True}, "is_assistant"),
}


def assert_refused_option(target: Any, drafter: Any, drafting: dict[str, Any], name: str) -> None:
    """Nothing is changed, and the next call is as exact as ever."""
    given, words = REFUSED[name]
    before = snapshot(target)
    arguments = {**INPUTS, **SAMPLED, **given, **drafting}
    refused(lambda: target.generate(**arguments), ValueError, words)
    assert snapshot(target) == before
    assert_identical(target, drafter, INPUTS, **SAMPLED)
