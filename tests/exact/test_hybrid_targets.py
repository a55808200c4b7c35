"""Targets with running states against stock `generate`: float64, without tolerance; a sample by default."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.caches import CLOSE, FP32, assert_same_cache
from support.cases import MODES, batch, replay
from support.compare import assert_identical, run, same, tally
from support.families import HYBRIDS, ROUNDS_INSIDE, WITHOUT_ATTENTION, needs_running_states, sampled
from support.guests import dflash_drafter
from support.interruptions import TOKENS
from support.tiny import prompts, tiny_eagle_drafter, tiny_head, tiny_target
from support.turns import RAGGED, next_turn_of
from support.users import TOKENIZER, Listener, Stopped
from transformers import DynamicCache

from hf_dart import TreeConfig, attach
from hf_dart.cache.states import RunningStates, states_of
from hf_dart.decoding import feed
from hf_dart.models.stock_steps import CACHE, cache_name

pytestmark = needs_running_states
NO_ADAPTER_AFTER_MIXERS = {"falcon_h1", "nemotron_h", *WITHOUT_ATTENTION}  # PEFT refuses it
MAMBA_1 = ["mamba", "falcon_mamba"]
EXACT = tally("float64, tiny targets with running states")
SAMPLE = ["lfm3", "zaya", "qwen3_5", "falcon_h1", "nemotron_h", "jamba", "mamba", "mamba2"]


@pytest.mark.parametrize("family", [*sampled(HYBRIDS, *SAMPLE), "zaya_sw"])
def test_families(family: str) -> None:
    """Tokens, and all that a call returns."""
    target = attach(tiny_target(family))
    for size, mode in ((4, "greedy"), (1, "T=1")):
        inputs, options = batch(size, "sdpa"), {**MODES[mode], "max_new_tokens": 16}
        known = replay(target, inputs, misses=[0.1, 0.5, 0.3, 0.4][:size], **options)
        assert_identical(target, known, inputs, into=EXACT, **options)
        assert known.last_stats.tau > 1.3
    told = {f"output_{name}": True for name in ("logits", "scores", "hidden_states")}
    for more in ({}, {"return_dict_in_generate": True, **told}):
        options = {**MODES["T=1"], "max_new_tokens": 16, **more}
        stock, ours = assert_identical(target, tiny_head(target), prompts(RAGGED), into=EXACT, **options)
    pads = [max(RAGGED) - length for length in RAGGED]
    assert_same_cache(ours.output[CACHE], stock.output[CACHE], pads, close=FP32 if family in ROUNDS_INSIDE else CLOSE)


@pytest.mark.filterwarnings("error:This call runs uncompiled.*level by level")
@pytest.mark.parametrize("executor", ["captured"], indirect=True)
@pytest.mark.parametrize("family", sampled(["lfm2", "lfm2_moe", "lfm3"], "lfm3"))
def test_captured(family: str, executor: str) -> None:
    """Others go through a tree level by level in float64, uncompiled; `engine/test_fixed_states.py` lets them not."""
    test_families(family)


def test_rows_that_ran_on_are_brought_back(noted: Any) -> None:
    """Without end tokens, rows that have stopped run on until the others have: farther than stock's cache goes."""
    went_back = noted(RunningStates, "back_to_prompt", lambda _, rows: rows)
    target = attach(tiny_target("lfm3"))
    head, inputs, stop = tiny_head(target), prompts(RAGGED), {"do_sample": False, "max_new_tokens": 24}
    known = replay(target, inputs, misses=[0.0, 0.9, 0.0, 0.5], **stop)
    stop |= {"stop_strings": ["a", "e", "i", "o"], "tokenizer": TOKENIZER}
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    stock, ours = (
        run(target, inputs, 0, **{CACHE: cache}, **drafting, **stop)
        for cache, drafting in zip(caches, ({}, {"assistant": known}), strict=True)
    )
    assert torch.equal(ours.sequences, stock.sequences)
    assert went_back
    assert_same_cache(caches[1], caches[0], [max(RAGGED) - length for length in RAGGED], stock.sequences)
    for drafter in (known, head):
        after = next_turn_of(inputs, ours.sequences)
        options = {"max_new_tokens": 8, "do_sample": False}
        stock = run(target, after, 1, **{CACHE: copy.deepcopy(caches[0])}, **options)
        same(run(target, after, 1, **{CACHE: copy.deepcopy(caches[1])}, **options, assistant=drafter), stock)


@pytest.mark.parametrize("lengths", [[7], pytest.param(RAGGED, marks=pytest.mark.matrix)], ids=str)
@pytest.mark.parametrize("family", ["mamba2", *(pytest.param(its, marks=pytest.mark.matrix) for its in MAMBA_1)])
def test_interrupted_without_attention(family: str, lengths: list[int]) -> None:
    """Such a cache does not tell how long its text is: its states are those after a beginning of stock's text."""
    target = attach(tiny_target(family))
    inputs, options = prompts(lengths), {"do_sample": False}
    known = replay(target, inputs, misses=[0.1, 0.7, 0.3, 0.5][: len(lengths)], max_new_tokens=TOKENS, **options)
    states = []
    for tokens in range(1, TOKENS):
        cache = DynamicCache(config=target.config)
        run(target, inputs, 0, **{cache_name(target): cache}, max_new_tokens=tokens, **options)
        states.append(states_of(cache))
    reached = set()
    for token in range(1, TOKENS):
        cache = DynamicCache(config=target.config)
        told = {"max_new_tokens": TOKENS, "streamer": Listener(token, Stopped)}
        with pytest.raises(Stopped):
            run(target, inputs, 0, **{cache_name(target): cache}, assistant=known, **told, **options)
        same = [
            all(torch.allclose(states_of(cache)[slot], state, 1e-6, 1e-6) for slot, state in its.items())
            for its in states[:token]
        ]
        assert sum(same) == 1
        reached.add(same.index(True))
    assert 0 in reached
    assert len(reached) > 2 or len(lengths) > 1


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("family", sampled(HYBRIDS, "qwen3_5"))
def test_a_target_with_adapters(family: str) -> None:
    """LoRA on the projections of mixers and attention; switched off, and merged, it is another text."""
    target = tiny_target(family)
    inputs, options = prompts(RAGGED), {"do_sample": False, "max_new_tokens": 12}
    leaves = {name.split(".")[-1]: part for name, part in target.named_modules()}
    projections = {name for name, part in leaves.items() if isinstance(part, torch.nn.Linear) and "proj" in name}
    if family in NO_ADAPTER_AFTER_MIXERS:
        projections.discard("out_proj")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tuned = get_peft_model(
            target, LoraConfig(r=2, target_modules=sorted(projections), init_lora_weights=False)
        ).eval()
    attach(tuned)
    head = tiny_head(target)
    for _ in range(2):
        known = replay(tuned, inputs, misses=[0.1, 0.5, 0.3, 0.4], **options)
        for drafter in (known, head):
            assert_identical(tuned, drafter, inputs, **options)
        assert known.last_stats.tau > 1.3
        tuned.merge_adapter()


def test_levels_are_as_many_as_pay() -> None:
    """Mamba 1 takes trees level by level; a target without states has no levels to pay for."""
    taus = {}
    for family in ("jamba", "llama"):
        target, inputs = attach(tiny_target(family)), prompts([7])
        known = replay(target, inputs, misses=[0.0], do_sample=False, max_new_tokens=16)
        for cost in (0.0, 50.0):
            sized = TreeConfig(level_cost=cost, draft_cost=0.0, lookup=0)
            assert_identical(target, known, inputs, do_sample=False, max_new_tokens=16, tree_config=sized)
            taus[family, cost] = known.last_stats.tau
    assert taus["jamba", 0.0] == taus["llama", 0.0] == taus["llama", 50.0] > 3
    assert taus["jamba", 50.0] == 1


@pytest.mark.parametrize("family", sampled(HYBRIDS, "qwen3_5"))
def test_drafters_with_keys_and_values_of_their_own(family: str, tmp_path: Path) -> None:
    target = attach(tiny_target(family))
    for drafter in (dflash_drafter(tmp_path, target).double(), tiny_eagle_drafter(target)):
        for size, mode in ((1, "T=1"), (4, "greedy")):
            assert_identical(target, drafter, batch(size, "sdpa"), max_new_tokens=16, **MODES[mode])


def test_a_failure_in_the_prefill_leaves_all_as_it_was() -> None:
    target, options = attach(tiny_target("falcon_h1")), {"max_new_tokens": 5, "do_sample": False}
    head, inputs, cache = tiny_head(target), prompts(RAGGED), DynamicCache(config=target.config)
    first = run(target, inputs, 0, **{CACHE: cache}, assistant=head, **options)
    before, next_turn = copy.deepcopy(cache), next_turn_of(inputs, first.sequences)

    # Once stock has written to every layer.
    with patch.object(feed, "mask_kinds", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run(target, next_turn, 0, **{CACHE: cache}, assistant=head, **options)
    assert states_of(cache).keys() == states_of(before).keys()
    assert all(torch.equal(states_of(cache)[slot], state) for slot, state in states_of(before).items())
    ours = run(target, next_turn, 0, **{CACHE: cache}, assistant=head, **options)
    same(ours, run(target, next_turn, 0, **{CACHE: before}, **options))


def test_a_cache_that_records_its_past_is_refused() -> None:
    """As transformers' assisted generation leaves it, which takes models whose states are short convolutions alone."""
    target, options = attach(tiny_target("lfm2")), {"max_new_tokens": 5, "do_sample": False}
    inputs, cache = prompts([7]), DynamicCache(config=target.config)
    first = run(target, inputs, 0, **{CACHE: cache}, prompt_lookup_num_tokens=2, **options)
    inputs = next_turn_of(inputs, first.sequences)
    with pytest.raises(ValueError, match=r"records the past .* pass the whole text with a new cache"):
        target.generate(**inputs, **{CACHE: cache}, **options, assistant=tiny_head(target))
