"""Options of `generate`, one and many at a time: what stock returns, and the generator where stock leaves it.

All in float64 without tolerance for tokens and generator; scores, logits and hidden states to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import tally
from support.options import FACTORS, FAMILIES, TOKENS, assert_pairs_are_stocks, check, replay
from support.options import clock as clock
from support.outcome import assert_close, call, identical, same
from support.pairwise import pairwise
from support.tiny import (
    PAD,
    VOCABULARY,
    prompts,
    tiny_diffusion_drafter,
    tiny_eagle_drafter,
    tiny_head,
    tiny_target,
)
from support.users import TOKENIZER, Criterion, Processor
from torch import Tensor
from transformers import (
    DynamicCache,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkingConfig,
)

from hf_dart import TreeConfig

EXACT = tally("float64, options in pairs")


# ---- every two options together ---------------------------------------------------------------------------

CASES = pairwise({factor: list(levels) for factor, levels in FACTORS.items()})


@pytest.mark.filterwarnings("ignore:Passing `")  # what stock says about processors and embeddings
@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(case.values()))
def test_options_in_pairs(case: dict[str, str], llama: tuple[Any, Any], clock: Callable[[], None]) -> None:
    check(case, *llama, 0, clock, EXACT)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:Passing `")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("family", FAMILIES)
def test_options_in_pairs_everywhere(family: str, seed: int, clock: Callable[[], None]) -> None:
    assert_pairs_are_stocks(family, seed, clock, EXACT)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    target = tiny_target("llama")
    return target, tiny_head(target)


# ---- one by one -------------------------------------------------------------------------------------------

SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": TOKENS, "pad_token_id": PAD}
GREEDY = {"do_sample": False, "max_new_tokens": TOKENS, "pad_token_id": PAD}


@pytest.mark.parametrize("kind", ["keeps count", "draws"])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "T=1"])
def test_a_users_own_calls_are_stocks_calls(llama: tuple[Any, Any], mode: dict[str, Any], size: int, kind: str) -> None:
    """The same ids, scores and order, also for rows that have ended beside others."""
    target, head = llama
    inputs = prompts([9, 3, 7, 12][:size])
    wanted = {"eos_token_id": [3, 11, 19], "return_dict_in_generate": True, "output_scores": True}
    steps = 0
    for seed in range(4):
        runs = []
        for drafting in ({}, {"assistant": head}):
            processor, criterion = Processor(kind), Criterion(kind)
            own = {"logits_processor": [processor], "stopping_criteria": [criterion]}
            done = call(target, seed, **inputs, **mode, **own, **wanted, **drafting)
            runs.append((done, processor.calls, criterion.calls))
        (stock, *theirs), (ours, *made) = runs
        same(ours, stock)
        for asked, told in zip(made, theirs, strict=True):
            assert_close(tuple(asked), tuple(told), 1e-5)
        steps += len(processor.calls)
    assert steps > 16


def test_ended_rows_do_not_hold_up_the_others(llama: tuple[Any, Any]) -> None:
    """Stock fills them up; so does the draft, and a round is as long as that of the rows still running."""
    target, _ = llama
    inputs = prompts([9, 3, 7, 12])
    options = {**SAMPLED, "max_new_tokens": 60, "eos_token_id": [3], "return_dict_in_generate": True}
    case = dict.fromkeys(FACTORS, "")
    seed = next(
        seed
        for seed in range(50)
        if 3 > sum(3 in row for row in call(target, seed, **inputs, **options).sequences[:, 12:30].tolist()) > 0
    )
    drafter = replay(case, inputs, call(target, seed, **inputs, **options).sequences)
    drafter.misses.zero_()
    # It does not know of the end.
    written = drafter.sequences[:, 12:]
    written[(written == 3).cumsum(1) - (written == 3).long() > 0] = 7
    identical(target, drafter, inputs, seed, output_scores=True, **options)
    assert drafter.last_stats is not None
    assert drafter.last_stats.tau > 5


@pytest.mark.parametrize("length", [3, 9, 13, 40])
@pytest.mark.parametrize("size", [1, 4])
def test_a_length_criterion_of_the_users_own(llama: tuple[Any, Any], size: int, length: int) -> None:
    """It takes the place of stock's, be it longer or shorter."""
    target, head = llama
    inputs = prompts([9, 3, 7, 12][:size])
    for mode in (GREEDY, SAMPLED):
        stock = identical(target, head, inputs, stopping_criteria=[MaxLengthCriteria(length)], **mode)
        width = inputs["input_ids"].shape[1]
        assert stock.sequences.shape[1] == max(length, width + 1)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 1.5},
        {"guidance_scale": 2.0, "negative_prompt_ids": prompts([4, 2, 3, 4])["input_ids"]},
    ],
    ids=["guided", "negative prompt"],
)
def test_guidance(llama: tuple[Any, Any], size: int, options: dict[str, Any]) -> None:
    """The processor runs the model itself, with a cache of its own."""
    target, head = llama
    options = {name: value[:size] if isinstance(value, Tensor) else value for name, value in options.items()}
    for mode in (GREEDY, SAMPLED):
        identical(target, head, prompts([7] * size), **options, **mode)


@pytest.mark.parametrize("size", [1, 4])
def test_watermark_with_state(llama: tuple[Any, Any], size: int) -> None:
    target, head = llama
    config = SynthIDTextWatermarkingConfig(keys=[3, 5, 7, 11], ngram_len=3)
    for seed in range(2):
        identical(target, head, prompts([7] * size), seed, watermarking_config=config, **SAMPLED)


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3n"])
@pytest.mark.parametrize("lengths", [[9], [9, 3, 7, 12], [2, 2]], ids=["1", "4", "2 of 2"])
def test_hidden_states(family: str, lengths: list[int]) -> None:
    """Also where there are as many rows and positions as streams."""
    target = tiny_target(family)
    head = tiny_head(target)
    asked = {"return_dict_in_generate": True, "output_hidden_states": True, "eos_token_id": [3, 11, 19]}
    for mode in (GREEDY, SAMPLED):
        stock = identical(target, head, prompts(lengths), **asked, **mode)
        assert len(stock.output.hidden_states[0]) == target.config.num_hidden_layers + 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [[9], [1], [9, 3, 7, 12]], ids=str)
def test_embeddings_for_a_prompt(family: str, lengths: list[int]) -> None:
    target = tiny_target(family)
    head = tiny_head(target)
    ids = prompts(lengths)
    inputs = {
        "inputs_embeds": target.get_input_embeddings()(ids["input_ids"]).detach(),
        "attention_mask": ids["attention_mask"],
    }
    head.tree_config = TreeConfig(lookup=0, nodes=12)
    for mode in (GREEDY, SAMPLED):
        stock = identical(target, head, inputs, **mode)
        assert stock.sequences.shape[1] == TOKENS
        # The head drafts from them what it drafts from the ids.
        told = head.last_stats.committed
        by_ids = identical(target, head, ids, **mode)
        assert torch.equal(by_ids.sequences[:, max(lengths) :], stock.sequences)
        assert head.last_stats.committed == told


def test_embeddings_and_a_cache(llama: tuple[Any, Any]) -> None:
    """As the first turn and as the second."""
    target, head = llama
    ids = prompts([7])["input_ids"]
    first = call(target, 0, input_ids=ids, **GREEDY).sequences
    embed = target.get_input_embeddings()
    ways = {
        "ids, then embeddings": ({"input_ids": ids}, {"inputs_embeds": embed(first).detach()}),
        "embeddings, then ids": ({"inputs_embeds": embed(ids).detach()}, {"input_ids": first}),
    }
    for earlier, later in ways.values():
        turns = []
        for drafting in ({}, {"assistant": head}):
            cache = DynamicCache(config=target.config)
            call(target, 0, **earlier, **GREEDY, past_key_values=cache, **drafting)
            turns.append(call(target, 0, **later, **SAMPLED, past_key_values=cache, **drafting))
        assert turns[0].error is None
        same(turns[1], turns[0])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prefill_in_chunks(family: str) -> None:
    target = tiny_target(family)
    head = tiny_head(target)
    for lengths in ([23], [23, 5, 12, 17]):
        for chunk in (1, 7, 40):
            identical(target, head, prompts(lengths), prefill_chunk_size=chunk, **SAMPLED)


@pytest.mark.parametrize("size", [1, 4])
def test_stop_strings(llama: tuple[Any, Any], size: int) -> None:
    target, head = llama
    inputs = prompts([9, 3, 7, 12][:size])
    for mode in (GREEDY, SAMPLED):
        text = call(target, 0, **inputs, **mode).sequences[0, inputs["input_ids"].shape[1] :]
        stops = [TOKENIZER.decode(text[8:10]), "xyz"]
        stock = identical(target, head, inputs, stop_strings=stops, tokenizer=TOKENIZER, **mode)
        if size == 1:
            assert stock.sequences.shape[1] < 9 + TOKENS, "the string was to end the text early"


@pytest.mark.parametrize("length", [12.0, 12.5, float("inf"), 2**63])
def test_lengths_that_are_no_small_whole_numbers(llama: tuple[Any, Any], length: float) -> None:
    target, head = llama
    inputs = prompts([9, 4])
    for mode in (GREEDY, SAMPLED):
        eos = list(range(VOCABULARY // 2)) if length > 100 else None
        stock = identical(target, head, inputs, **{**mode, "max_new_tokens": length, "eos_token_id": eos})
        assert length > 100 or stock.sequences.shape[1] == 9 + math.ceil(length)


def test_autocast() -> None:
    """What drafters keep is of their own dtype, whatever their projections come out in."""
    target = tiny_target("llama", dtype=torch.float32)
    for make in (tiny_head, tiny_eagle_drafter, tiny_diffusion_drafter):
        drafter = make(target)
        for lengths in ([7], [7, 4]):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = target.generate(**prompts(lengths), **GREEDY, assistant=drafter)
            assert output.shape == (len(lengths), 7 + TOKENS)


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "T=1"])
def test_ids_of_another_width(llama: tuple[Any, Any], mode: dict[str, Any]) -> None:
    target, head = llama
    inputs = prompts([9, 4])
    stock = identical(target, head, {**inputs, "input_ids": inputs["input_ids"].int()}, **mode)
    assert stock.sequences.dtype == torch.int64
    identical(target, head, {**inputs, "labels": inputs["input_ids"]}, **mode)  # stock drops them


@pytest.mark.parametrize("known", [None, 2], ids=["stock's", "a prompt that does not count"])
def test_a_penalty_sees_one_row(llama: tuple[Any, Any], known: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the whole batch for each of its rows."""
    target, head = llama
    seen = []
    plain = RepetitionPenaltyLogitsProcessor.__call__

    def call(self: Any, ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(len(scores))
        return plain(self, ids, scores)

    monkeypatch.setattr(RepetitionPenaltyLogitsProcessor, "__call__", call)
    inputs = prompts([9, 3, 7, 12])
    penalty = (
        {"repetition_penalty": 1.3}
        if known is None
        else {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=known)]}
    )
    for mode in (GREEDY, SAMPLED):
        identical(target, head, inputs, **penalty, **mode)
        seen.clear()
        target.generate(**inputs, **penalty, **mode, assistant=head)
        assert set(seen) == {1}
