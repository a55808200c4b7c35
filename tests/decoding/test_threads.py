"""Calls side by side in threads: each is right by itself, and none hands its noise to another."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def test_two_targets_with_two_heads_each() -> None:
    """Greedy: all threads of a process share the generator that sampling draws from."""
    targets = [tiny_target(family) for family in ("llama", "gemma3")]
    heads = [[tiny_head(target, seed=seed) for seed in (0, 1)] for target in targets]
    inputs = [prompts([9, 4], seed=seed) for seed in (0, 1)]
    options = {"do_sample": False, "max_new_tokens": 40}
    stock = [[target.generate(**each, **options).tolist() for each in inputs] for target in targets]
    jobs = list(itertools.product(range(2), range(2), range(2)))
    together = Barrier(len(jobs))

    def call(which: int, head: int, prompt: int) -> bool:
        together.wait()
        found = [
            targets[which].generate(**inputs[prompt], **options, assistant=heads[which][head]).tolist()
            for _ in range(2)
        ]
        return found == [stock[which][prompt]] * 2

    with ThreadPoolExecutor(len(jobs)) as pool:
        assert all(pool.map(lambda job: call(*job), jobs))
    assert all(head.last_stats.tau > 1 for pair in heads for head in pair)


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
