"""Calls of `generate` against stock's: a table of cases, every two levels together, and options one by one.

All in float64 without tolerance for tokens and generator; scores, logits, hidden states and caches to rounding.
"""

from __future__ import annotations

import copy
import math
from itertools import combinations
from random import Random
from typing import Any

import pytest
import torch
from support import drawn
from support.called import Tallies, failures_of
from support.cases import SAMPLERS, replay
from support.compare import assert_identical, run, same
from support.tiny import PAD, VOCABULARY, prompts, tiny_eagle_drafter, tiny_head, tiny_target
from torch import Tensor
from transformers import (
    DynamicCache,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import stopping_criteria

from hf_dart import TreeConfig, attach
from hf_dart.decoding import feed
from hf_dart.models.stock_steps import CACHE

TOKENS = 16
NEW = {"max_new_tokens": TOKENS}
TOLD = {"return_dict_in_generate": True}

# ---- every two levels together ----------------------------------------------------------------------------

# Per factor: level -> options of `generate`.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "sampler": SAMPLERS,
    "history": {
        "none": {},
        "penalty": {"repetition_penalty": 1.3},
        "n-grams": {"no_repeat_ngram_size": 2},
        "prompt": {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2},
        "watermark": {"watermarking_config": WatermarkingConfig(bias=1.5, seeding_scheme="lefthash")},
        "watermark with state": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7, 11], ngram_len=3)},
        "guided": {"guidance_scale": 1.5},
    },
    "bans": {
        "none": {},
        "bad words": {"bad_words_ids": [[3], [4, 5], [6, 7, 8]]},
        "suppressed": {"suppress_tokens": [2, 3, 4], "begin_suppress_tokens": [5, 6]},
        "bias": {"sequence_bias": {(5,): 2.0, (7, 9): -3.0}},
        "renormalised": {"renormalize_logits": True},
        "cleaned": {"remove_invalid_values": True},
    },
    "length": {
        "new tokens": NEW,
        "one": {"max_new_tokens": 1},
        "in all": {"max_length": 31},
        "at least": {**NEW, "min_new_tokens": 12},
        "at least in all": {"max_length": 31, "min_length": 19},
        "forced": {**NEW, "forced_eos_token_id": 12, "forced_bos_token_id": 9},
        "decay": {**NEW, "exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 11},
    },
    "output": {
        "ids": {},
        "dict": TOLD,
        "scores": {**TOLD, "output_scores": True},
        "logits": {**TOLD, "output_logits": True},
        "hidden states": {**TOLD, "output_hidden_states": True},
        "asked in vain": {"output_scores": True, "output_hidden_states": True},
    },
}
TREES = [
    None,
    TreeConfig(nodes=1),
    TreeConfig(nodes=2),
    TreeConfig.chain(3),
    TreeConfig.chain(31),
    TreeConfig(nodes=3, top_k=2, beam=1),
    TreeConfig(nodes=60, top_k=VOCABULARY, beam=40),
    TreeConfig(nodes=200, top_k=100, beam=200),
    TreeConfig(nodes=16, depth=1),
    TreeConfig(nodes=40, shared_noise=False, top_k=3),
    TreeConfig(nodes=8, lookup=0),
    TreeConfig(nodes=40, lookup=100),
]
KINDS = ["head", "head of 31 tokens", "replay", "eagle", "diffusion", "lookup"]
# Per factor: level -> fields of a case, as `support.drawn` draws them; options are added to those above.
CALLS: dict[str, dict[str, dict[str, Any]]] = {
    "target": {name: {"target": name} for name in ("llama", "gemma3", "mistral", "deepseek_v3", "gpt2")},
    "end": {
        "none": {},
        "EOS": {"options": {"eos_token_id": 11}},
        "several EOS": {"options": {"eos_token_id": [3, 11, 19, 27]}},
        "strings": {"options": {"stop_strings": ["xy", "aB", "q", "Tz"]}},
        "time": {"options": {"max_time": 9.5}},
        **{kind: {"criteria": [kind]} for kind in ("ends rows", "one row ends all", "keeps count", "draws")},
    },
    "user": {
        "none": {},
        "allowed tokens": {"allowed tokens": True},
        **{
            kind: {"processors": [kind]}
            for kind in ("reads ids", "keeps count", "looks across rows", "draws", "in place")
        },
    },
    "rows": {
        "1": {"lengths": [7]},
        "4": {"lengths": [9, 3, 7, 12]},
        "3 of each": {"lengths": [5, 8], "options": {"num_return_sequences": 3}},
        "one token": {"lengths": [1, 1]},
    },
    "prompt": {
        **{kind: {"prompt": kind} for kind in ("ids", "embeddings", "both", "int32", "positions")},
        "chunks": {"options": {"prefill_chunk_size": 3}},
    },
    "cache": {
        "none": {},
        "static": {"cache": "static"},
        "bare": {"cache": "bare"},
        "turns": {"cache": "dynamic", "turns": 2},
    },
    "streamer": {"none": {}, "one": {"streamer": "records"}},
    "route": {name: {"route": name} for name in ("keywords", "config and keywords", "custom_generate")},
    "drafter": {kind: {"drafter": kind} for kind in KINDS},
    "tree": {str(tree): {"tree": tree} for tree in TREES},
    "executor": {"called": {}, "captured": {"captured": True}},
}
FACTORS = {name: list(levels) for name, levels in {**OPTIONS, **CALLS}.items()}
# Most of these cases take stock's own steps, of whatever shape a tree is: every other one will do.
IN_STEP = FACTORS | {"tree": FACTORS["tree"][::2]}
# Without what needs stock's own steps: of all trees.
AHEAD = FACTORS | {
    "history": ["none", "penalty", "n-grams", "prompt"],
    # Cleaned scores under a decay have stock fail at rows that have ended, which only stock goes on with.
    "bans": ["none", "bad words", "suppressed", "bias", "renormalised"],
    "output": ["ids", "dict"],
    "end": ["none", "EOS", "several EOS", "strings"],
    "user": ["none"],
    "streamer": ["none"],
}


def case_of(levels: dict[str, str], seed: int) -> dict[str, Any]:
    """A case of `support.drawn` by the level of each factor."""
    case = {
        **drawn.PLAIN, "seed": seed, "weights": seed % 2, "misses": [0.1, 0.0, 0.5, 0.2] * 3,
        "options": {"pad_token_id": PAD},
    }  # fmt: skip
    for factor, level in levels.items():
        fields = {"options": OPTIONS[factor][level]} if factor in OPTIONS else CALLS[factor][level]
        case |= fields | {"options": {**case["options"], **copy.deepcopy(fields.get("options", {}))}}
    return case | {"drafted turns": [True] * case["turns"]}


def pairwise(factors: dict[str, list[str]], seed: int = 0) -> list[dict[str, str]]:
    """Few cases (factor -> level) that hold every pair of levels of two factors at least once; the same every time."""
    random, names = Random(seed), list(factors)

    def pair(one: tuple[str, str], other: tuple[str, str]) -> tuple[tuple[str, str], ...]:
        return tuple(sorted((one, other), key=lambda level: names.index(level[0])))

    levels = [[(name, level) for level in levels] for name, levels in factors.items()]
    missing = {pair(one, other) for left, right in combinations(levels, 2) for one in left for other in right}
    cases = []
    while missing:
        # Built around a pair that is still missing; of each other factor, in any order, the level that adds most.
        case = dict(min(missing))
        for name in random.sample(names, len(names)):
            choices = random.sample(factors[name], len(factors[name]))
            gained = [sum(pair((name, level), known) in missing for known in case.items()) for level in choices]
            case.setdefault(name, choices[gained.index(max(gained))])
        missing.difference_update(pair(one, other) for one, other in combinations(case.items(), 2))
        cases.append({name: case[name] for name in names})
    return cases


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(1, 9))])
@pytest.mark.parametrize("factors", [IN_STEP, AHEAD], ids=["in step", "ahead"])
def test_every_two_levels(factors: dict[str, list[str]], seed: int) -> None:
    """Of all options, prompts, caches, drafters and executors; most of them are what stock itself runs."""
    cases = [(", ".join(levels.values()), case_of(levels, seed)) for levels in pairwise(factors, seed)]
    tallies = Tallies()
    failures = failures_of(cases, tallies)
    assert not failures, "\n".join([*failures, str(tallies)])
    assert tallies.kinds["same"] > 0.8 * len(cases), tallies
    assert tallies.kinds["captured"] > 0.1 * len(cases), tallies
    assert sum(tau > 1.3 for tau in tallies.taus) > len(cases) / 6, tallies


# ---- one by one -------------------------------------------------------------------------------------------

SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": TOKENS, "pad_token_id": PAD}
GREEDY = {"do_sample": False, "max_new_tokens": TOKENS, "pad_token_id": PAD}
RAGGED = [9, 3, 7, 12]


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    """A target and its head."""
    target = tiny_target("llama")
    return target, tiny_head(target)


@pytest.mark.usefixtures("executor")
def test_ended_rows_do_not_hold_up_the_others(llama: tuple[Any, Any]) -> None:
    """Stock fills them up; so does the draft, and a round is as long as that of the rows still running."""
    target, _ = llama
    inputs = prompts(RAGGED)
    options = {**SAMPLED, "max_new_tokens": 60, "eos_token_id": [3], "return_dict_in_generate": True}
    seed = next(
        seed
        for seed in range(50)
        if 3 > sum(3 in row for row in run(target, inputs, seed, **options).sequences[:, 12:30].tolist()) > 0
    )
    drafter = replay(target, inputs, misses=[0.0] * 4, seed=seed, **options)
    # It does not know of the end.
    written = drafter.sequences[:, 12:]
    written[(written == 3).cumsum(1) - (written == 3).long() > 0] = 7
    assert_identical(target, drafter, inputs, seed=seed, output_scores=True, **options)
    assert drafter.last_stats.tau > 5


class Later(MaxLengthCriteria):
    """Ends five tokens after its length, which is no one else's."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.max_length + 5)


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize(
    ("criteria", "ends"),
    [
        ([MaxLengthCriteria(3)], 10),
        ([MaxLengthCriteria(40)], 40),
        ([MaxLengthCriteria(18), MaxLengthCriteria(14)], 14),
        ([Later(8)], 13),
        ([Later(20)], 22),
    ],
    ids=["before the prompt's end", "after max_length", "two", "derived", "derived, after max_length"],
)
def test_length_criteria_of_the_users_own(llama: tuple[Any, Any], criteria: list[Any], ends: int) -> None:
    """Stock's kind takes the place of stock's, be it longer or shorter; one that derives from it does not."""
    for lengths, mode in (([9], SAMPLED), (RAGGED, GREEDY), (RAGGED, SAMPLED)):
        options = {**mode, "max_new_tokens": None, "max_length": 22, "stopping_criteria": criteria}
        stock, _ = assert_identical(*llama, prompts([min(length, 9) for length in lengths]), **options)
        assert stock.sequences.shape[1] == ends


def test_texts_longer_than_the_targets_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's reminder comes where stock's would."""
    told: list[bool] = []
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", lambda *_: told.append(True))
    target = attach(tiny_target("llama", max_position_embeddings=9))
    for length, new, wanted in ((7, 3, []), (7, 4, [True]), (10, 1, []), (10, 2, [True])):
        for drafting in ({}, {"assistant": tiny_head(target)}):
            target.generate(**prompts([length]), do_sample=False, max_new_tokens=new, **drafting)
            assert told[:1] == wanted
            told.clear()


def test_embeddings_for_a_prompt(llama: tuple[Any, Any]) -> None:
    """The head drafts from them what it drafts from the ids."""
    target, head = llama
    ids = prompts(RAGGED)
    embeddings = target.get_input_embeddings()(ids["input_ids"]).detach()
    committed = []
    for given in (ids, {"inputs_embeds": embeddings, "attention_mask": ids["attention_mask"]}):
        assert_identical(target, head, given, **GREEDY, tree_config=TreeConfig(lookup=0, nodes=12))
        committed.append(head.last_stats.committed)
    assert committed[0] == committed[1]


def test_embeddings_and_a_cache(llama: tuple[Any, Any]) -> None:
    """As the first turn and as the second."""
    target, head = llama
    ids = prompts([7])["input_ids"]
    first = run(target, {"input_ids": ids}, 0, **GREEDY).sequences
    embed = target.get_input_embeddings()
    ways = {
        "ids, then embeddings": ({"input_ids": ids}, {"inputs_embeds": embed(first).detach()}),
        "embeddings, then ids": ({"inputs_embeds": embed(ids).detach()}, {"input_ids": first}),
    }
    for earlier, later in ways.values():
        turns = []
        for drafting in ({}, {"assistant": head}):
            cache = DynamicCache(config=target.config)
            run(target, earlier, 0, **GREEDY, **{CACHE: cache}, **drafting)
            turns.append(run(target, later, 0, **SAMPLED, **{CACHE: cache}, **drafting))
        same(turns[1], turns[0])


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("length", [12.0, 12.5, float("inf"), 2**63, 10**12])
def test_lengths_that_are_no_small_whole_numbers(llama: tuple[Any, Any], length: float) -> None:
    """No room is taken for tokens that never come."""
    for mode in (GREEDY, SAMPLED):
        eos = list(range(VOCABULARY // 2)) if length > 100 else None
        stock, _ = assert_identical(*llama, prompts([9, 4]), **{**mode, "max_new_tokens": length, "eos_token_id": eos})
        assert length > 100 or stock.sequences.shape[1] == 9 + math.ceil(length)


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}], ids=["plain", "penalty"])
def test_a_pad_that_is_no_token(llama: tuple[Any, Any], options: dict[str, float]) -> None:
    assert_identical(*llama, prompts([7, 7]), **{**GREEDY, "pad_token_id": -1, "eos_token_id": None}, **options)


@pytest.mark.parametrize("known", [None, 2], ids=["stock's", "a prompt that does not count"])
def test_a_penalty_sees_one_row(llama: tuple[Any, Any], known: int | None, noted: Any) -> None:
    """Not the whole batch for each of its rows."""
    target, head = llama
    seen = noted(RepetitionPenaltyLogitsProcessor, "__call__", lambda _, ids, scores: len(scores))
    own = {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=known)]}
    penalty = {"repetition_penalty": 1.3} if known is None else own
    for mode in (GREEDY, SAMPLED):
        assert_identical(target, head, prompts(RAGGED), **penalty, **mode)
        seen.clear()
        target.generate(**prompts(RAGGED), **penalty, **mode, assistant=head)
        assert set(seen) == {1}


# ---- the ends of tables -----------------------------------------------------------------------------------


def test_drafts_go_on_behind_a_table_that_has_no_hard_end() -> None:
    """Rotary positions run on; only no tree crosses the place where a table might end."""
    target = attach(tiny_target("llama", max_position_embeddings=24))
    options = {"do_sample": False, "max_new_tokens": 60}
    drafter = replay(target, prompts([9]), misses=[0.0], **options)
    assert_identical(target, drafter, prompts([9]), **options)
    assert drafter.last_stats.tau > 5


# ---- what drafters read -----------------------------------------------------------------------------------


def test_inference_mode_leaves_nothing_behind() -> None:
    """Neither tensors that no gradient goes through, nor refusals of weights that were made in it."""
    fields: dict[str, Any] = {"selector_rank": 4, "draft_vocabulary": range(0, VOCABULARY, 2)}
    with torch.inference_mode():
        target = tiny_target("llama")
        assert_identical(target, tiny_head(target, **fields), prompts([7]), **GREEDY)
    target = tiny_target("llama")
    head = tiny_head(target, **fields)
    with torch.inference_mode():
        target.generate(**prompts([7]), **GREEDY, assistant=head)
    hidden = torch.randn(1, head.config.hidden_size, dtype=torch.float64, requires_grad=True)
    head.logits(hidden).sum().backward()
    assert hidden.grad is not None


@pytest.mark.parametrize("make", [tiny_head, tiny_eagle_drafter], ids=["head", "eagle"])
def test_however_a_prompt_is_fed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding in front of it costs no drafts, nor do the pieces of a long one, whose masks are not quadratic."""
    target, ids = attach(tiny_target("llama")), prompts([23])["input_ids"]
    drafter, committed = make(target), []
    for pads, at_once in ((0, 2048), (5, 2048), (0, 5)):
        monkeypatch.setattr(feed, "AT_ONCE", at_once)
        inputs = {"input_ids": torch.nn.functional.pad(ids, (pads, 0))}
        inputs["attention_mask"] = (torch.arange(pads + 23) >= pads).long()[None]
        run(target, inputs, 0, assistant=drafter, do_sample=False, max_new_tokens=40)
        committed.append(drafter.last_stats.committed)
    assert max(map(max, committed[0])) > 1
    assert committed[0] == committed[1] == committed[2]
