"""Calls that are broken off, and what must hold of what they leave."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import hf_dart.decoding
from hf_dart.cache.stock_layers import attention_layers, held_by, keeps_states
from hf_dart.decoding.api import attach
from hf_dart.models.stock_steps import CACHE
from support.caches import CLOSE, FP32, assert_same_states
from support.cases import replay
from support.compare import assert_identical, run
from support.families import FORGETS_STATES, ROUNDS_INSIDE
from support.tiny import prompts, tiny_head, tiny_target
from support.turns import KINDS
from support.users import Listener

TOKENS = 15
GREEDY = {"do_sample": False, "max_new_tokens": TOKENS}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": TOKENS}


def used(family: str, make: Callable[[Any], Any] = tiny_head) -> tuple[Any, Any]:
    """A target and its drafter after a first call, at which transformers installs its hooks for hidden states."""
    target = attach(tiny_target(family))
    head = make(target)
    run(target, prompts([3]), 0, assistant=head, max_new_tokens=2)
    return target, head


def states_by_token(batch: int, vocabulary: int, seed: int) -> list[Tensor]:
    """The generator's state after 0, 1, ... tokens of stock sampling."""
    torch.manual_seed(seed)
    states = [torch.get_rng_state()]
    for _ in range(TOKENS):
        torch.multinomial(torch.full((batch, vocabulary), 1 / vocabulary), num_samples=1)
        states.append(torch.get_rng_state())
    return states


def held_entries(cache: Any) -> list[Tensor]:
    layers = [layer for layer in attention_layers(cache) if layer.is_initialized]
    return [states for layer in layers for states in held_by(layer)]


def assert_holds_a_prefix(target: Any, cache: Any, inputs: dict[str, Tensor], text: Tensor) -> int:
    """All layers end at the same slot, and hold what stock would have put there; returns that slot.

    States of some mixers differ by more than rounding where tokens are fed at once; stock feeds them one by one.
    """
    held = {int(layer.get_seq_length()) for layer in attention_layers(cache)}
    assert len(held) == 1
    slots = held.pop()
    if slots == 0:
        return 0
    mask = torch.ones(len(text), slots, dtype=torch.long)
    mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    plain, prompt = DynamicCache(config=target.config), inputs["input_ids"].shape[1]
    stateful = any(map(keeps_states, cache.layers))
    cuts = [0, *range(prompt, slots + 1)] if stateful else [0, slots]
    for start, end in pairwise(cuts):
        fed = {"input_ids": text[:, start:end], "attention_mask": mask[:, :end], CACHE: plain, "use_cache": True}
        with torch.no_grad():
            target(**fed, position_ids=positions[:, start:end])
    for left, right in zip(cache.layers, plain.layers, strict=True):
        if keeps_states(right):
            assert_same_states(left, right)
    close = FP32 if target.config.model_type in ROUNDS_INSIDE else CLOSE
    for got, want in zip(held_entries(cache), held_entries(plain), strict=True):
        kept = min(got.shape[2], want.shape[2])
        for row, pad in enumerate((inputs["attention_mask"] == 0).sum(-1).tolist()):
            first = max(0, pad - (slots - kept))
            torch.testing.assert_close(got[row, :, -kept:][:, first:], want[row, :, -kept:][:, first:], **close)
    return slots


def assert_goes_on(
    target: Any, cache: Any, inputs: dict[str, Tensor], stock: Tensor, token: int, **options: Any
) -> None:
    """From `token` on, with that cache and the generator as it is, the rest of stock's text comes out.

    Where stock forgets states when it is handed several tokens, that is so if one token is left to be run.
    """
    prompt = inputs["input_ids"].shape[1]
    text = stock[:, : prompt + token]
    slots = assert_holds_a_prefix(target, cache, inputs, text)
    assert prompt <= slots < prompt + max(token, 1) or slots == token == 0
    if slots == prompt + token or token == TOKENS:
        return  # nothing to run, or nothing left
    if target.config.model_type in FORGETS_STATES and slots < prompt + token - 1:
        return
    seen = torch.ones(len(text), token, dtype=torch.long)
    mask = torch.cat([inputs["attention_mask"], seen], dim=1)
    options = {**options, "max_new_tokens": TOKENS - token}
    rest = target.generate(input_ids=text, attention_mask=mask, **{CACHE: cache}, **options)
    assert torch.equal(rest, stock)


_OURS = str(Path(hf_dart.decoding.__file__).parent.parent)


@contextmanager
def interrupted_at(line: int) -> Any:
    """Raise KeyboardInterrupt when the `line`-th line of this package is about to run; yields the count so far."""
    passed = [0]

    def watch(frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        if event == "line":
            passed[0] += 1
            if passed[0] == line:
                raise KeyboardInterrupt
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield passed
    finally:
        sys.settrace(before)


def interrupt(
    family: str, kind: str, lengths: list[int], sampled: bool, cases: int, seed: int,
    make: Callable[[Any], Any] | None = None, **more: Any,
) -> list[int]:  # fmt: skip
    """Break calls off at that many lines; returns how many tokens had been generated in each.

    They are drafted by a replay, or by what `make` makes of the target.
    """
    target, head = used(family, make or tiny_head)
    inputs, options = prompts(lengths), {**(SAMPLED if sampled else GREEDY), **more}
    run(target, inputs, 0, assistant=head, max_new_tokens=2)  # proves it for such rows
    stock = run(target, inputs, seed, **options).sequences
    states = states_by_token(len(lengths), target.config.vocab_size, seed)
    misses = [0.1, 0.7, 0.3, 0.5][: len(lengths)]
    drafter = head if make else replay(target, inputs, misses=misses, seed=seed, **options)

    def call(line: int, cache: Any, listener: Listener) -> int:
        with interrupted_at(line) as passed:
            same = head if make else copy.deepcopy(drafter)  # a replay draws its misses
            run(target, inputs, seed, **{CACHE: cache}, streamer=listener, assistant=same, **options)
        return passed[0]

    call(-1, KINDS[kind](target), Listener())  # the first call of its kind has its target tried, which is more lines
    total = call(-1, KINDS[kind](target), Listener())
    random = Random(seed)
    reached = []
    for line in (1 + int(total * (case + random.random()) / cases) for case in range(cases)):  # spread over all
        cache, listener = KINDS[kind](target), Listener()
        with pytest.raises(KeyboardInterrupt) as kept:  # as notebooks keep it, with all that the call held
            call(line, cache, listener)
        token = listener.tokens
        if sampled:
            left = torch.get_rng_state()
            again = run(target, inputs, seed, **options, assistant=head).sequences
            assert torch.equal(again, stock), "it still leads"
            torch.set_rng_state(left)
            matches = [index for index, state in enumerate(states) if torch.equal(state, torch.get_rng_state())]
            assert len(matches) == 1, "the generator is at no token of stock's"
            assert token <= matches[0] <= token + 1
            token = matches[0]
        assert_goes_on(target, cache, inputs, stock, token, **options, assistant=head)
        reached.append(token)
        del kept
    assert_identical(target, head, inputs, seed=seed, **options)
    return reached
