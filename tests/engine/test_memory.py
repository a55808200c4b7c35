"""Tiers take turns in one memory: calls of all kinds after each other, each stock's."""

from __future__ import annotations

from typing import Any

import torch
from support.cases import batch
from support.compare import assert_identical, tally
from support.tiny import tiny_head, tiny_target

import hf_dart
from hf_dart import TreeConfig
from hf_dart.engine.memory import Memory

TURNS = tally("float64, calls in turns")


def test_buffers_of_one_name() -> None:
    memory, cpu = Memory(), torch.device("cpu")
    wide = memory.zeros("keys", (4, 6), torch.float32, cpu)
    wide.fill_(3)
    narrow = memory.of("")("keys", (2, 3), torch.float32, cpu)
    assert narrow.data_ptr() != wide.data_ptr()
    narrow = memory.zeros("keys", (2, 3), torch.float32, cpu)
    assert narrow.data_ptr() == wide.data_ptr()
    assert narrow.is_contiguous()
    assert not narrow.any()
    assert memory.zeros("keys", (2, 3), torch.float64, cpu).data_ptr() != wide.data_ptr()
    wider = memory.zeros("keys", (5, 6), torch.float32, cpu)
    assert wider.data_ptr() != wide.data_ptr()
    assert memory.zeros("keys", (4, 6), torch.float32, cpu).data_ptr() == wider.data_ptr()
    assert (wide.view(-1)[6:] == 3).all()


def test_calls_in_turns() -> None:
    """One call's rounds write over what another's left."""
    target = tiny_target("qwen3")
    head = tiny_head(target)
    made = hf_dart.compile(target, head, backend=None, first_tier=64)
    sampled = {"do_sample": True, "top_k": 0}
    calls: list[tuple[int, dict[str, Any]]] = [
        (4, {"do_sample": False, "tree_config": TreeConfig(nodes=13)}),
        (1, {"do_sample": False, "tree_config": TreeConfig(nodes=8)}),
        (4, {**sampled, "tree_config": TreeConfig(nodes=8)}),
        (4, {"do_sample": False, "no_repeat_ngram_size": 3}),
        (1, {**sampled, "temperature": 0.7, "tree_config": TreeConfig(nodes=1)}),
    ]
    for _ in range(2):
        for size, options in calls:
            assert_identical(target, head, batch(size, "sdpa"), into=TURNS, max_new_tokens=14, **options)
    tiers = [tier for tier in made.tiers if tier is not None]
    assert len(tiers) > 3
    assert len({tier._cache.entries.store.buffer(0).data_ptr() for tier in tiers}) == 1
    assert len({tier._draft_cache.store.buffer(0).data_ptr() for tier in tiers if tier._draft_cache}) == 1
