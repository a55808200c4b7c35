"""The replay that model_cards/learning quotes: a memory adds to copies, and a step accepts what its tree holds."""

from __future__ import annotations

import pytest
from support.scripts import experiment
from transformers import AutoTokenizer

from hf_dart import SuffixStore
from hf_dart.hub.loading import PACKAGED_TARGET

remembered = experiment("remembered")


def test_a_memory_adds_to_copies(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED_TARGET)
    calls = list(remembered.tool_calls(tokenizer, 5))
    alone, remembers = (remembered.replayed(calls, store) for store in (None, SuffixStore()))
    assert remembers.accepted / remembers.steps > 1.5 * alone.accepted / alone.steps
    assert remembers.accepted + remembers.steps >= sum(len(answer) for _, answer in calls)
    remembered.replay({"calls": calls[:2]})
    assert "| calls | 2, " in capsys.readouterr().out
