"""Turns over one cache: the same as stock's, and what the next one drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from hf_dart import DartHead
from hf_dart.decoding.api import attach
from hf_dart.drafters.base import Proposal
from hf_dart.models.stock_steps import CACHE, cache_name
from support.caches import CLOSE, FP32, assert_same_cache
from support.compare import Run, run, same
from support.families import ROUNDS_INSIDE
from support.tiny import PAD, prompts, tiny_head, tiny_target

RAGGED = [9, 3, 7, 13]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "max_new_tokens": 17},
    "sampled": {"do_sample": True, "top_k": 0, "max_new_tokens": 17},
    # Some rows end early, and lie in the cache with pads after their end.
    "eos": {"do_sample": True, "top_k": 0, "max_new_tokens": 17, "eos_token_id": [3, 11, 19, 27], "pad_token_id": PAD},
}
KINDS: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda target: DynamicCache(config=target.config),
    "static": lambda target: StaticCache(config=target.config, max_cache_len=96),
}


def next_turn_of(inputs: dict[str, Tensor], sequences: Tensor) -> dict[str, Tensor]:
    """The next turn's inputs: the text so far and four more tokens."""
    ids = torch.cat([sequences, prompts([4] * len(sequences), seed=9)["input_ids"]], dim=1)
    mask = inputs["attention_mask"]
    seen = torch.ones(len(ids), ids.shape[1] - mask.shape[1], dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.cat([mask, seen], dim=1)}


def two_turns(
    target: Any, make: Callable[[Any], Any], lengths: list[int], drafting: tuple[Any, Any], mode: dict[str, Any]
) -> tuple[Any, Run, Run]:
    """The cache and two turns over it, drafted by `drafting` (None: plain)."""
    cache, inputs = make(target), prompts(lengths)
    done = []
    for seed, drafter in enumerate(drafting):
        options = {**mode, "assistant": drafter} if drafter is not None or "tree_config" in mode else mode
        done.append(run(target, inputs, seed, **{cache_name(target): cache}, **options))
        inputs = next_turn_of(inputs, done[-1].sequences)
    return cache, done[0], done[1]


def assert_turns_are_stocks(
    family: str, kind: str, lengths: list[int], mode: str, make: Callable[[Any], Any] = tiny_head
) -> None:
    """Drafted by what `make` makes of the target in the first turn, in the second and in both."""
    target = attach(tiny_target(family))
    head = make(target)
    want, *plain = two_turns(target, KINDS[kind], lengths, (None, None), MODES[mode])
    for drafting in ((head, None), (head, head), (None, head)):
        cache, *ours = two_turns(target, KINDS[kind], lengths, drafting, MODES[mode])
        for turn, stock in zip(ours, plain, strict=True):
            same(turn, stock)
        close = FP32 if family in ROUNDS_INSIDE else CLOSE
        assert_same_cache(cache, want, [max(lengths) - length for length in lengths], plain[1].sequences, close)


def first_draft(target: Any, head: DartHead, inputs: dict[str, Tensor], cache: Any) -> Tensor:
    """What the head drafts first, [B, d, V]."""
    propose, made = head.propose_ranked, []

    def tell(*args: Any, **kwargs: Any) -> Proposal:
        made.append(propose(*args, **kwargs))
        return made[-1]

    with mock.patch.object(head, "propose_ranked", tell):
        run(target, inputs, 1, **{CACHE: cache}, assistant=head, **MODES["greedy"])
    return made[0].logits


def assert_drafts_as_if_it_had_read_all(
    target: Any, head: Any, kind: str, lengths: list[int], mode: str, taken_up: list[bool]
) -> None:
    """The state that goes on is the one that a call over the whole text would have built."""
    cache, inputs = KINDS[kind](target), prompts(lengths)
    for seed in range(2):
        text = run(target, inputs, seed, **{CACHE: cache}, assistant=head, **MODES[mode]).sequences
        inputs = next_turn_of(inputs, text)
    goes_on = first_draft(target, head, inputs, cache)
    assert taken_up == [False, True, True]
    fresh = first_draft(target, head, inputs, KINDS[kind](target))
    torch.testing.assert_close(goes_on, fresh, rtol=1e-9, atol=1e-9)
