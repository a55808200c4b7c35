"""Whatever hypothesis draws - target, options, batch, lengths, seeds - ours equals stock in float64.

`pytest tests/test_fuzz.py` runs a few cases, with `-m matrix` more than two thousand.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support.compare import tally
from support.families import EXPERTS_IN_A_LOOP, FAMILIES
from support.outcome import call, same
from support.tiny import PAD, VOCABULARY, ReplayDrafter, prompts, tiny_head, tiny_target
from torch import Tensor
from transformers import DynamicCache

from hf_dart import DartHead, TreeConfig

FUZZED = tally("fuzz")
# Every kind of mask, cache layer, position and attention; few experts, which take their time.
TARGETS = [
    "llama",
    "qwen3",
    "gemma3",
    "gemma2",
    "mistral",
    "gpt2",
    "opt",
    "gptj",
    "cohere2",
    "gemma4_shared",
    "deepseek_v32",
    "llama4",
    "phi3",
]
EAGER_ONLY = {"gptj", "gemma2"}


@cache
def pair(family: str, attention: str, seed: int) -> tuple[Any, DartHead]:
    target = tiny_target(family, attention, seed=seed)
    return target, tiny_head(target, draft_length=3 + 2 * seed)


def tokens(**size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(2, VOCABULARY - 1), unique=True, **size)


def some(options: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of these options, or none."""
    return st.fixed_dictionaries({}, optional=options)


SAMPLERS = st.one_of(
    st.just({"do_sample": False}),
    some(
        {
            "temperature": st.sampled_from([0.3, 0.8, 1.6]),
            "top_p": st.sampled_from([0.5, 0.9]),
            "min_p": st.sampled_from([0.02, 0.2]),
            "typical_p": st.just(0.8),
            "epsilon_cutoff": st.just(0.02),
            "eta_cutoff": st.just(0.02),
            "top_h": st.just(0.6),
            "top_k": st.sampled_from([0, 1, 5, 40]),
        }
    ).map(lambda drawn: {"do_sample": True, "top_k": 0, **drawn}),
)
PROCESSORS = some(
    {
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "no_repeat_ngram_size": st.integers(1, 3),
        "encoder_repetition_penalty": st.just(1.4),
        "encoder_no_repeat_ngram_size": st.integers(1, 3),
        "bad_words_ids": st.lists(tokens(min_size=1, max_size=2), min_size=1, max_size=3),
        "suppress_tokens": tokens(min_size=1, max_size=5),
        "begin_suppress_tokens": tokens(min_size=1, max_size=5),
        "sequence_bias": st.just([[[5], 2.0], [[7, 9], -3.0]]),
        "forced_eos_token_id": st.just(3),
        "renormalize_logits": st.just(True),
        "remove_invalid_values": st.just(True),
    }
)
ENDS = some(
    {
        "eos_token_id": tokens(min_size=1, max_size=4),
        "min_new_tokens": st.integers(1, 10),
    }
)
TREES = st.one_of(
    st.none(),
    st.builds(
        TreeConfig,
        nodes=st.one_of(st.none(), st.integers(1, 40)),
        depth=st.one_of(st.none(), st.integers(1, 7)),
        top_k=st.integers(1, VOCABULARY),
        beam=st.integers(1, 20),
        lookup=st.sampled_from([0, 3, 24]),
        shared_noise=st.booleans(),
    ),
)


@st.composite
def calls(draw: Any) -> dict[str, Any]:
    """One `generate` call, and what drafts in it."""
    family = draw(st.sampled_from(TARGETS))
    attention = "eager" if family in EAGER_ONLY else draw(st.sampled_from(["sdpa", "eager"]))
    rows = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 24), min_size=rows, max_size=rows))
    if attention == "eager":  # stock gives NaN for padded rows in float64
        lengths = lengths[:1] * rows
    options = {**draw(SAMPLERS), **draw(PROCESSORS), **draw(ENDS), "pad_token_id": PAD}
    options["max_new_tokens"] = draw(st.one_of(st.integers(12, 40), st.integers(options.get("min_new_tokens", 1), 11)))
    if draw(st.booleans()):
        options["return_dict_in_generate"] = True
    if draw(st.integers(0, 3)) == 0:
        options["prefill_chunk_size"] = draw(st.integers(1, 12))
    turns = draw(st.sampled_from([1, 1, 1, 2]))
    if draw(st.booleans()) and options["do_sample"] and rows < 4 and turns == 1:
        options["num_return_sequences"] = draw(st.integers(2, 3))
    return {
        "family": family,
        "attention": attention,
        "lengths": lengths,
        "options": options,
        "weights": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 2**32)),
        "tree": draw(TREES),
        "misses": draw(st.one_of(st.none(), st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=15, max_size=15))),
        "turns": turns,
        "bare cache": draw(st.booleans()),
    }


def compare(case: dict[str, Any]) -> None:
    """Run one case both ways."""
    target, drafter = pair(case["family"], case["attention"], case["weights"])
    inputs, options, start = prompts(case["lengths"], case["seed"]), case["options"], case["seed"]
    ours, stock = dict(inputs), dict(inputs)
    if case["turns"] > 1:  # the second on the cache that the first has filled
        known = {} if case["bare cache"] and case["family"] != "deepseek_v32" else {"config": target.config}
        ours["past_key_values"], stock["past_key_values"] = DynamicCache(**known), DynamicCache(**known)
    for _ in range(case["turns"]):
        wanted = call(target, start, **stock, **options)
        if wanted.error is not None:  # stock itself fails: nothing to be equal to
            return
        if case["misses"] is not None:
            rows = len(wanted.sequences)
            pads = (inputs["attention_mask"] == 0).sum(-1).repeat_interleave(rows // len(inputs["input_ids"]))
            drafter = ReplayDrafter(wanted.sequences, pads.tolist(), VOCABULARY, misses=case["misses"][:rows])
        drafted = call(target, start, **ours, **options, assistant=drafter, tree_config=case["tree"])
        same(drafted, wanted)
        FUZZED.add(drafter.last_stats)
        if case["turns"] > 1:
            follow_up(inputs, wanted.sequences, start + 1)
            ours.update(inputs)
            stock.update(inputs)


def follow_up(inputs: dict[str, Tensor], text: Tensor, start: int) -> None:
    """Put a question of four tokens behind the answer; rows that ended early have visible pads inside."""
    question = prompts([4] * len(text), start)
    seen = torch.ones(len(text), text.shape[1] + 4 - inputs["input_ids"].shape[1], dtype=torch.long)
    inputs["input_ids"] = torch.cat([text, question["input_ids"]], dim=1)
    inputs["attention_mask"] = torch.cat([inputs["attention_mask"], seen], dim=1)


BUDGET = settings(
    deadline=None,
    database=None,
    print_blob=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@settings(BUDGET, max_examples=36)
@seed(0)
@given(calls())
def test_any_call(case: dict[str, Any]) -> None:
    compare(case)


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(1, 9))
def test_many_calls(part: int) -> None:
    """2080 cases; a part is repeated by its number."""

    @settings(BUDGET, max_examples=260)
    @seed(part)
    @given(calls())
    def any_call(case: dict[str, Any]) -> None:
        compare(case)

    any_call()


def test_every_target_is_one_of_the_families() -> None:
    assert set(TARGETS) <= set(FAMILIES)
    assert set(TARGETS) & EXPERTS_IN_A_LOOP
