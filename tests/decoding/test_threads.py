"""Calls side by side in threads: each is right by itself, and none hands its noise to another."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from support.outcome import call, identical
from support.tiny import PAD, prompts, tiny_head, tiny_target

GREEDY = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": PAD}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 20, "pad_token_id": PAD}


def side_by_side(work: Callable[[int], None], count: int) -> None:
    """Run `work` of 0, 1, ... in a thread each."""
    threads = [Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    target = tiny_target("llama")
    return target, tiny_head(target)


def test_concurrent_calls(llama: tuple[Any, Any]) -> None:
    """Threads share a target, and two of them a head."""
    target, head = llama
    heads = [head, head, tiny_head(target, draft_length=3)]
    cases = [prompts(lengths, seed) for seed, lengths in enumerate([[7], [9, 4], [3, 5, 8]])]
    options = {**GREEDY, "max_new_tokens": 60, "repetition_penalty": 1.2}
    alone = [call(target, 0, **inputs, **options).sequences for inputs in cases]
    together: list[Any] = [None] * len(cases)

    def work(index: int) -> None:
        together[index] = target.generate(**cases[index], **options, assistant=heads[index])

    side_by_side(work, len(cases))
    assert all(torch.equal(left, right) for left, right in zip(together, alone, strict=True))


def test_two_targets_with_two_heads_each(llama: tuple[Any, Any]) -> None:
    target, head = llama
    sliding = tiny_target("gemma3")
    pairs = [(target, head), (sliding, tiny_head(sliding)), (target, tiny_head(target)), (sliding, tiny_head(sliding))]
    inputs = prompts([6, 3])
    options = {**GREEDY, "max_new_tokens": 40}
    alone = [call(each, 0, **inputs, **options).sequences for each, _ in pairs]
    together: list[Any] = [None] * len(pairs)

    def work(index: int) -> None:
        each, its_head = pairs[index]
        together[index] = each.generate(**inputs, **options, assistant=its_head)

    side_by_side(work, len(pairs))
    assert all(torch.equal(left, right) for left, right in zip(together, alone, strict=True))


def test_concurrent_sampled_calls_draw_noise_of_their_own(llama: tuple[Any, Any]) -> None:
    """As stock's do. Afterwards a seed gives stock's text again."""
    target, head = llama
    inputs = prompts([7])
    options = {**SAMPLED, "max_new_tokens": 40, "temperature": 2.0}
    together: list[Any] = [None] * 4
    begin = Barrier(len(together))

    def work(index: int) -> None:
        begin.wait()
        together[index] = target.generate(**inputs, **options, assistant=head)

    side_by_side(work, len(together))
    assert len({tuple(sequence[0].tolist()) for sequence in together}) == len(together)
    identical(target, head, inputs, **options)
