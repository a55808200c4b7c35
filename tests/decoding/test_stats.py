"""Where the time of a call goes, by phases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import prompts, tiny_head, tiny_target

from hf_dart import TreeConfig
from hf_dart.decoding import stats
from hf_dart.decoding.api import open_request, requested
from hf_dart.decoding.seats import Seats


@pytest.mark.parametrize("calls", [1, 2])
def test_drafts_take_the_time_of_a_selector(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves on in nothing else; trees grow around it."""
    target, clock = tiny_target("llama"), [0.0]
    head = tiny_head(target, selector_rank=4)
    own = head.transitions

    def scored(*given: Any) -> torch.Tensor | None:
        clock[0] += 1
        return own(*given)

    monkeypatch.setattr(head, "transitions", scored)
    monkeypatch.setattr(stats, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(stats, "processor_time", lambda: 2 * clock[0])
    options: dict[str, Any] = {"assistant": head, "tree_config": TreeConfig(nodes=8), "max_new_tokens": 20}
    sessions = [open_request(requested(target, **prompts([5], seed=1), **options)) for _ in range(calls)]
    seats = Seats(calls)
    for session in sessions:
        seats.take(session)
    for _ in range(3):
        assert not seats.round()
    for session in sessions:
        nothing = dict.fromkeys(stats.PHASES, 0.0)
        assert session.stats.seconds == nothing | {"draft": 3 / calls}
        assert session.stats.processor_seconds == nothing | {"draft": 6 / calls}
