"""Drafters with a window shorter than the prompt: the text is stock's all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import MODES
from support.compare import assert_identical, run, same
from support.guests import dflash_drafter
from support.tiny import prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target
from support.turns import MODES as OPTIONS
from support.turns import next_turn_of
from transformers import DynamicCache

from hf_dart import TreeConfig
from hf_dart.cache.slot_cache import SlotCache
from hf_dart.decoding.api import close_call, open_request, requested
from hf_dart.decoding.seats import Seats
from hf_dart.models.stock_steps import CACHE

WINDOW = {"draft_window": 24, "draft_sink": 2}
SIZES = [[70], [70, 9, 40]]


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """Whether the caches from which entries were dropped were on fixed shapes."""
    forget, found = SlotCache.forget, set()

    def note(cache: SlotCache, entries: int) -> None:
        before = cache.dropped
        forget(cache, entries)
        if not torch.equal(cache.dropped, before):
            found.add(cache.fixed)

    monkeypatch.setattr(SlotCache, "forget", note)
    return found


@pytest.mark.parametrize("name", ["head", "layers", "eagle", "diffusion", "dflash"])
def test_text_is_stocks(name: str, executor: str, dropped: set[bool], tmp_path: Path) -> None:
    """In trees and chains, of one row and of several, some of which outgrow the window between two rounds."""
    target = tiny_target("qwen3")
    makers: dict[str, Any] = {
        "head": lambda: tiny_head(target, **WINDOW, block_attention="bidirectional"),
        "layers": lambda: tiny_head(target, **WINDOW, num_layers=2),
        "eagle": lambda: tiny_eagle_drafter(target, **WINDOW),
        "diffusion": lambda: tiny_diffusion_drafter(target, **WINDOW, context_window=30),
        "dflash": lambda: dflash_drafter(tmp_path, target),
    }
    drafter = makers[name]()
    drafter.draft_window, drafter.draft_sink = WINDOW.values()
    trees = [drafter.tree_config, TreeConfig(nodes=6, beam=1)]
    for number, mode in enumerate(("greedy", "T=1", "several EOS")):
        drafter.tree_config = trees[number % 2]
        for lengths in SIZES:
            assert_identical(target, drafter, prompts(lengths), **MODES[mode], max_new_tokens=40)
    assert dropped == ({False, True} if executor == "captured" and name in ("head", "layers") else {False})


def test_calls_in_seats_write_what_they_write_alone(dropped: set[bool]) -> None:
    """Each row has dropped what its own text no longer needs, whoever comes and goes."""
    target = tiny_target("llama")
    head, seats = tiny_head(target, **WINDOW), Seats(3)
    calls = [(70, 16), (9, 60), (40, 30), (50, 20)]
    options = [{**prompts([length]), "max_new_tokens": tokens, "do_sample": False} for length, tokens in calls]
    waiting = [open_request(requested(target, assistant=head, **one)) for one in options]
    sessions = [*waiting]
    while waiting or seats.taken:
        while waiting and seats.free:
            seats.take(waiting.pop(0))
        assert [failure for _, failure in seats.round() if failure] == []
    for session, one in zip(sessions, options, strict=True):
        assert torch.equal(close_call(session), target.generate(**one))
    assert dropped == {False}


@pytest.mark.parametrize("lengths", SIZES, ids=str)
def test_turns_are_stocks(lengths: list[int], executor: str, dropped: set[bool]) -> None:
    """Over one cache, where the drafter goes on with what its window has kept, and with another window."""
    target = tiny_target("llama")
    head = tiny_head(target, draft_sink=2)
    texts = []
    for drafting in ({}, {"assistant": head}):
        cache, inputs = DynamicCache(config=target.config), prompts(lengths)
        for seed, window in enumerate((40, 40, 24, None)):
            head.draft_window = window
            texts.append(run(target, inputs, seed, **{CACHE: cache}, **OPTIONS["sampled"], **drafting))
            inputs = next_turn_of(inputs, texts[-1].sequences)
    for ours, stock in zip(texts[4:], texts[:4], strict=True):
        same(ours, stock)
    assert dropped == {False, executor == "captured"}
