"""Call after call: memory stays where it is, and so do tensors, hooks and what models and heads carry."""

from __future__ import annotations

import gc
import sys
from itertools import cycle, islice
from mmap import mmap
from traceback import walk_tb
from typing import Any
from weakref import ref

import pytest
import torch
from support.cases import MODES
from support.compare import snapshot
from support.memory import RUNS, resident
from support.tiny import prompts, tiny_head, tiny_target
from support.turns import KINDS
from support.users import Listener, OwnError, Processor

from hf_dart import Batcher, LanguageModelDrafter, Learner, TreeConfig, attach
from hf_dart.decoding.session import Session
from hf_dart.models import packed_weights
from hf_dart.models.stock_steps import CACHE
from hf_dart.serve import batcher

LIMIT = 16 * 2**20


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def calls() -> list[dict[str, Any]]:
    """Short and long, one row and ragged ones, sampled and greedy, on caches of the user's, refused, broken off."""
    plain = [
        {**prompts(lengths, seed), **mode, "max_new_tokens": tokens}
        for seed, (lengths, tokens) in enumerate([([7], 12), ([31], 30), ([9, 3, 7, 13], 16)])
        for mode in MODES.values()
    ]
    tree = TreeConfig(nodes=30)
    return [
        *plain,
        {**plain[0], "tree_config": tree, "return_dict_in_generate": True},
        {**plain[5], "tree_config": tree, "max_new_tokens": 60},
        {**plain[1], CACHE: KINDS["dynamic"], "output_scores": True, "return_dict_in_generate": True},
        {**plain[2], "streamer": lambda target: Listener(5), "tree_config": tree},
        {**plain[3], "num_beams": 2},
    ]


def make(pairs: list[tuple[Any, Any]], number: int) -> None:
    """Drafted `generate` calls, one kind and one target after another."""
    made = cycle(calls())
    for index, options in enumerate(islice(made, number)):
        target, head = pairs[index % len(pairs)]
        fresh = {name: value(target) if callable(value) else value for name, value in options.items()}
        try:
            target.generate(**fresh, assistant=head)
        except (OwnError, ValueError):
            assert "streamer" in fresh or "num_beams" in fresh


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other allocators keep more")
@pytest.mark.parametrize(
    "number", [pytest.param(34, id="short"), pytest.param(1000, id="long", marks=pytest.mark.matrix)]
)
def test_memory_is_flat(number: int) -> None:
    targets = [tiny_target(family) for family in ("llama", "gemma3")]
    pairs = [(target, tiny_head(target)) for target in targets]
    make(pairs, 3 * len(calls()))  # until every buffer, kernel and cache of a kind exists
    before = [snapshot(target) for target in targets]
    tensors, grown = live_tensors(), []
    while len(grown) < RUNS and (not grown or grown[-1] >= LIMIT):  # a leak makes every run grow
        memory = resident()
        make(pairs, number)
        grown.append(resident() - memory)
    assert live_tensors() <= tensors
    assert min(grown) < LIMIT, grown
    assert [snapshot(target) for target in targets] == before


def test_what_has_ended_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By reference counts alone: collecting cycles may come too late for the next call's caches."""
    target = tiny_target("llama", dtype=torch.float32)
    head, sessions, made = tiny_head(target), list[Any](), Session.__init__
    other = LanguageModelDrafter(tiny_target("llama", dtype=torch.float32, num_hidden_layers=1), target=target)
    states = list[Any]()
    begin = other.begin
    monkeypatch.setattr(other, "begin", lambda *given: (state := begin(*given), states.append(ref(state)))[0])
    monkeypatch.setattr(Session, "__init__", lambda self, *given: (sessions.append(ref(self)), made(self, *given))[1])
    monkeypatch.setattr(packed_weights, "_LEAST", 1)
    monkeypatch.setattr(batcher, "PIECE", 4)
    options: dict[str, Any] = {**prompts([30]), "max_new_tokens": 10}
    gc.collect()
    gc.disable()
    try:
        target.generate(**options, assistant=head)
        target.generate(**options, assistant=other)
        assert states
        assert not [one for one in states if one() is not None]
        attach(target, head, learner=Learner())  # which packs weights
        target.generate(**options)
        assert packed_weights.packed_weights(target)
        with Batcher(target, head) as served:
            handles = [served.submit(**options, seed=seed) for seed in range(3)]
            failing = served.submit(**options, logits_processor=[Processor("raises")])
            handles[1].cancel()
        assert isinstance(failing.exception(), OwnError)
        frames = [frame for frame, _ in walk_tb(failing.exception().__traceback__)]
        assert not any(frame.f_locals for frame in frames if frame.f_code.co_filename != batcher.__file__)
        assert len(sessions) >= 4
        assert not [one for one in sessions if one() is not None]
        freed = ref(handles[0])
        del handles, failing, frames
        assert freed() is None
    finally:
        gc.enable()


def test_a_head_keeps_no_layer_of_its_target() -> None:
    """Another one may be loaded in its place."""
    target = tiny_target("llama")
    head, layer = tiny_head(target), ref(target.model.layers[0])
    del target
    gc.collect()
    assert layer() is None
    assert head.shared.lm_head is not None


def test_a_leak_would_be_seen() -> None:
    """A tensor per call is more than the counts above allow."""
    tensors, memory = live_tensors(), resident()
    pages = [mmap(-1, 2**26) for _ in range(3)]  # no memory that was freed before
    kept = [torch.frombuffer(new, dtype=torch.float32).fill_(1) for new in pages]
    assert live_tensors() >= tensors + len(kept)
    assert resident() - memory > LIMIT
