"""Copies in trees, and `LookupDrafter`, which drafts nothing else: accepted where text repeats; no token changes."""

from __future__ import annotations

from typing import Any

import pytest
from support.compare import assert_identical
from support.tiny import prompts, tiny_head, tiny_target

from hf_dart import LookupDrafter, TreeConfig, attach

GREEDY = {"do_sample": False, "max_new_tokens": 40}


@pytest.mark.parametrize("size", [1, 4])
def test_looping_text_is_copied(size: int) -> None:
    """A target whose text loops accepts copies that a random head does not find."""
    target = tiny_target("gemma3")  # its greedy text does
    head = tiny_head(target)
    inputs = prompts([11] * size)
    taus = []
    for lookup in (0, 24):
        assert_identical(target, head, inputs, **GREEDY, tree_config=TreeConfig(nodes=8, lookup=lookup))
        taus.append(head.last_stats.tau)
    assert taus[1] > taus[0] + 0.1


def test_no_head_asks_for_no_hidden_states(noted: Any) -> None:
    target = attach(tiny_target("llama"))
    asked = noted(type(target), "forward", lambda *args, **kwargs: kwargs.get("output_hidden_states"))
    target.generate(**prompts([7]), **GREEDY, assistant=LookupDrafter())
    assert len(asked) > 1
    assert not any(asked)


def test_copies_that_do_not_pay_pause_nothing() -> None:
    """Without a drafter there is nothing to pause, and no training to have gone wrong."""
    target = attach(tiny_target("llama"))
    drafter = LookupDrafter(TreeConfig(node_cost=0.2))
    options = {"do_sample": True, "top_k": 0, "temperature": 3.0, "max_new_tokens": 80}
    assert_identical(target, drafter, prompts([30]), **options)
    stats = drafter.last_stats
    assert stats.rounds > 40
    assert (stats.paused_rounds, drafter.warned) == (0, False)
