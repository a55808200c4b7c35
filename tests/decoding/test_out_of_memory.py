"""Memory runs out, or the drafter fails, in the middle of a call; and updates of stock caches that are taken back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.cases import replay
from support.compare import assert_identical, run
from support.interruptions import (
    GREEDY,
    SAMPLED,
    TOKENS,
    Broken,
    Listener,
    assert_goes_on,
    held_entries,
    states_by_token,
    used,
)
from support.outcome import snapshot
from support.tiny import prompts, tiny_target
from support.turns import KINDS, RAGGED
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from hf_dart import DartHead
from hf_dart.cache.stock_layers import undone_on_failure
from hf_dart.cache.target_cache import TargetCache
from hf_dart.decoding import request


@pytest.fixture(scope="module")
def pair() -> tuple[Any, DartHead]:
    return used("gemma3")  # full and sliding layers


@contextmanager
def out_of_memory(where: Any, name: str, call: int) -> Any:
    """The `call`-th call of a function fails."""
    function = getattr(where, name)
    left = [call]

    def fails(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(where, name, fails)
        patched.setattr(request, "check_verification", lambda *args: None)  # it would run a patched target first
        yield


def decoder_layer(target: Any) -> Any:
    """The class of the second decoder layer's attention: when it fails, the first has written its entries."""
    return type(target.model.layers[1].self_attn)


@pytest.mark.parametrize("call", [2, 8])
@pytest.mark.parametrize("lengths", [[7], RAGGED])
@pytest.mark.parametrize(("family", "kind"), [("gemma3", "dynamic"), ("gemma3", "static")])
def test_out_of_memory_in_the_target(family: str, kind: str, lengths: list[int], call: int) -> None:
    """In the prefill (the second layer of two), and in later rounds."""
    target, head = used(family)
    inputs = prompts(lengths)
    text = run(target, inputs, 0, **SAMPLED).sequences
    states = states_by_token(len(lengths), target.config.vocab_size, 0)
    before = snapshot(target)
    cache, listener = KINDS[kind](target), Listener()
    with out_of_memory(decoder_layer(target), "forward", call), pytest.raises(torch.OutOfMemoryError):
        run(target, inputs, 0, past_key_values=cache, streamer=listener, assistant=head, **SAMPLED)
    assert torch.equal(torch.get_rng_state(), states[listener.tokens])
    assert (listener.tokens == 0) == (call == 2)
    if call > 2:
        assert int(cache.get_seq_length()) > inputs["input_ids"].shape[1]
    assert_goes_on(target, cache, inputs, text, listener.tokens, **SAMPLED, assistant=head)
    assert snapshot(target) == before
    assert_identical(target, head, inputs, **SAMPLED)


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_memory_in_a_later_chunk_of_the_prefill(pair: tuple[Any, DartHead], kind: str) -> None:
    target, head = pair
    cache, inputs = KINDS[kind](target), prompts([9, 5])
    first = run(target, inputs, 0, past_key_values=cache, assistant=head, **GREEDY).sequences
    ids = torch.cat([first, prompts([14, 14], seed=3)["input_ids"]], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, ids.shape[1] - 9, dtype=torch.long)], dim=1)
    more = {"input_ids": ids, "attention_mask": mask}
    stocks = copy.deepcopy(cache)
    text = run(target, more, 0, **GREEDY, past_key_values=stocks, prefill_chunk_size=4).sequences
    if int(stocks.get_seq_length()) != text.shape[1] - 1:
        pytest.skip("this release of transformers reads a cached prefix again in chunks, which is refused")
    held = copy.deepcopy(held_entries(cache))
    options = {**GREEDY, "past_key_values": cache, "assistant": head, "prefill_chunk_size": 4}
    with out_of_memory(decoder_layer(target), "forward", 4), pytest.raises(torch.OutOfMemoryError):
        run(target, more, 0, **options)
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {first.shape[1] - 1}
    for before, after in zip(held, held_entries(cache), strict=True):
        assert torch.equal(before, after)
    assert torch.equal(run(target, more, 0, **options).sequences, run(target, more, 0, **GREEDY).sequences)


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_out_of_memory_where_the_cache_is_handed_back(pair: tuple[Any, DartHead], kind: str, call: int) -> None:
    """Not one layer is ahead of another then; the cache holds the prompt."""
    target, head = pair
    inputs = prompts(RAGGED)
    text = run(target, inputs, 0, **SAMPLED).sequences
    cache = KINDS[kind](target)
    whole = TargetCache._append

    def fails_from(self: Any, stock: Any, own: Any, grown: int) -> None:
        if own.index + 1 >= call:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        whole(self, stock, own, grown)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TargetCache, "_append", fails_from)
        with pytest.raises(torch.OutOfMemoryError):
            run(target, inputs, 0, past_key_values=cache, assistant=head, **SAMPLED)
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {inputs["input_ids"].shape[1]}
    assert_goes_on(target, cache, inputs, text, TOKENS, **SAMPLED)
    torch.manual_seed(0)
    assert_identical(target, head, inputs, **SAMPLED)


def test_a_call_without_a_listener(pair: tuple[Any, DartHead]) -> None:
    """The generator is at the token that every row has reached."""
    target, head = pair
    inputs = prompts(RAGGED)
    states = states_by_token(len(RAGGED), target.config.vocab_size, 0)
    drafter = replay(target, inputs, misses=[0.1, 0.7, 0.3, 0.5], **SAMPLED)
    with out_of_memory(type(drafter), "propose", 3), pytest.raises(torch.OutOfMemoryError):
        run(target, inputs, 0, assistant=drafter, **SAMPLED)
    reached = [index for index, state in enumerate(states) if torch.equal(state, torch.get_rng_state())]
    assert reached[0] > 1
    assert_identical(target, head, inputs, **SAMPLED)


def test_a_failing_drafter(pair: tuple[Any, DartHead]) -> None:
    target, head = pair
    inputs = prompts(RAGGED)
    text = run(target, inputs, 0, **SAMPLED).sequences
    for name, call in (("propose", 1), ("propose", 4), ("extend", 1), ("begin", 1)):
        cache, listener = DynamicCache(config=target.config), Listener()
        with out_of_memory(DartHead, name, call), pytest.raises(torch.OutOfMemoryError):
            run(target, inputs, 0, past_key_values=cache, streamer=listener, assistant=head, **SAMPLED)
        assert_goes_on(target, cache, inputs, text, listener.tokens, **SAMPLED, assistant=head)
        assert_identical(target, head, inputs, **SAMPLED)


# ---- taking back what a stock cache was given -------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 3, 6, 9, 14])
@pytest.mark.parametrize(("family", "make"), [
    ("gemma3", lambda config: DynamicCache(config=config)),
    ("gemma3", lambda config: StaticCache(config=config, max_cache_len=24)),
    ("llama", lambda config: DynamicCache()),
])  # fmt: skip
def test_updates_are_undone(family: str, make: Callable[[Any], Any], held: int) -> None:
    """With what a cache of every kind held before, its window full or not, it goes on as if nothing had been."""
    target = tiny_target(family)
    tokens = prompts([20, 20])["input_ids"]
    cache = make(target.config)

    def feed(start: int, stop: int) -> Tensor:
        return target(input_ids=tokens[:, start:stop], past_key_values=cache, use_cache=True).logits

    def break_off() -> None:
        with undone_on_failure(cache):
            feed(held, held + 5)
            raise Broken

    with torch.no_grad():
        if held:
            feed(0, held)
        before = copy.deepcopy(cache)
        addresses = [layer.keys.data_ptr() for layer in cache.layers if isinstance(layer, StaticLayer) and held]
        with pytest.raises(Broken):
            break_off()
        assert [layer.keys.data_ptr() for layer in cache.layers if isinstance(layer, StaticLayer) and held] == addresses
        assert cache.get_seq_length() == before.get_seq_length() == held
        assert len(cache.layers) == len(before.layers)
        got = feed(held, 20)
        cache = before
        assert torch.equal(got, feed(held, 20))
