"""Options of `generate`, every two of them together."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    WatermarkingConfig,
)
from transformers.generation import stopping_criteria as criteria_module

from support.compare import Tally
from support.outcome import call, same
from support.pairwise import pairwise
from support.tiny import (
    PAD,
    VOCABULARY,
    ReplayDrafter,
    prompts,
    tiny_head,
    tiny_target,
)
from support.users import TOKENIZER, Clock, Criterion, Processor, allowed

FAMILIES = ["llama", "gemma3", "deepseek_v3", "gpt2"]
TOKENS = 20
# Per factor: level -> keyword arguments, or a function that makes them again for each run.
FACTORS: dict[str, dict[str, Any]] = {
    "sampler": {
        "greedy": {"do_sample": False},
        "T=1": {"do_sample": True, "top_k": 0},
        "T=.7, top-k": {"do_sample": True, "temperature": 0.7, "top_k": 12},
        "top-p": {"do_sample": True, "top_k": 0, "top_p": 0.8},
        "min-p": {"do_sample": True, "top_k": 0, "min_p": 0.05},
        "typical": {"do_sample": True, "top_k": 0, "typical_p": 0.8},
        "epsilon": {"do_sample": True, "top_k": 0, "epsilon_cutoff": 0.02},
        "eta": {"do_sample": True, "top_k": 0, "eta_cutoff": 0.02},
        "top-h": {"do_sample": True, "top_k": 0, "top_h": 0.5},
    },
    "history": {
        "none": {},
        "penalty": {"repetition_penalty": 1.3},
        "n-grams": {"no_repeat_ngram_size": 2},
        "prompt": {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2},
        "watermark": {"watermarking_config": WatermarkingConfig(bias=1.5, seeding_scheme="lefthash")},
    },
    "bans": {
        "none": {},
        "bad words": {"bad_words_ids": [[3], [4, 5], [6, 7, 8]]},
        "suppressed": {"suppress_tokens": [2, 3, 4], "begin_suppress_tokens": [5, 6]},
        "bias": {"sequence_bias": {(5,): 2.0, (7, 9): -3.0}},
        "cleaned": {"renormalize_logits": True, "remove_invalid_values": True},
    },
    "length": {
        "new tokens": {"max_new_tokens": TOKENS},
        "in all": {"max_length": 31},
        "at least": {"max_new_tokens": TOKENS, "min_new_tokens": 12},
        "at least in all": {"max_length": 31, "min_length": 19},
        "forced": {"max_new_tokens": TOKENS, "forced_eos_token_id": 12, "forced_bos_token_id": 9},
        "decay": {"max_new_tokens": TOKENS, "exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 11},
    },
    "end": {
        "none": {},
        "EOS": {"eos_token_id": 11},
        "several EOS": {"eos_token_id": [3, 11, 19, 27]},
        "strings": {"stop_strings": ["xy", "aB", "q", "Tz"], "tokenizer": TOKENIZER},
        "time": {"max_time": 9.5},
        **{
            kind: lambda kind=kind: {"stopping_criteria": [Criterion(kind)]}
            for kind in ("ends rows", "one row ends all", "keeps count", "draws")
        },
    },
    "user": {
        "none": {},
        "allowed tokens": {"prefix_allowed_tokens_fn": allowed},
        **{
            kind: lambda kind=kind: {"logits_processor": [Processor(kind)]}
            for kind in ("reads ids", "keeps count", "looks across rows", "draws", "in place")
        },
    },
    "output": {
        "ids": {},
        "dict": {"return_dict_in_generate": True},
        "scores": {"return_dict_in_generate": True, "output_scores": True},
        "logits": {"return_dict_in_generate": True, "output_logits": True},
        "hidden states": {"return_dict_in_generate": True, "output_hidden_states": True},
        "asked in vain": {"output_scores": True, "output_hidden_states": True},
    },
    "prompt": {"ids": {}, "one token": {}, "embeddings": {}, "both": {}, "chunks": {"prefill_chunk_size": 3}},
    "rows": {"1": {}, "4": {}, "3 of each": {"num_return_sequences": 3}},
    "drafter": {"head": {}, "replay": {}},
}


def arguments(case: dict[str, str], target: Any, seed: int) -> tuple[Callable[[], dict[str, Any]], dict[str, Tensor]]:
    """What makes a case's keyword arguments, and its prompts as ids."""
    lengths = [7] if case["rows"] == "1" else [9, 3, 7, 12] if case["rows"] == "4" else [5, 8]
    ids = prompts([1] * len(lengths) if case["prompt"] == "one token" else lengths, seed)
    inputs: dict[str, Any] = dict(ids)
    if case["prompt"] in ("embeddings", "both"):
        inputs["inputs_embeds"] = target.get_input_embeddings()(inputs.pop("input_ids")).detach()
    if case["prompt"] == "both":
        inputs["input_ids"] = ids["input_ids"][:, -2:]

    def make() -> dict[str, Any]:
        options = {"pad_token_id": PAD, **inputs}
        for factor, level in case.items():
            made = FACTORS[factor][level]
            options.update(made() if callable(made) else made)
        return options

    return make, ids


def replay(case: dict[str, str], ids: dict[str, Tensor], sequences: Tensor) -> ReplayDrafter:
    """A drafter that knows stock's answer and misses a share of it, per row."""
    times = len(sequences) // len(ids["input_ids"])
    known = {"embeddings": 0, "both": 2}.get(case["prompt"], ids["input_ids"].shape[1])
    whole = torch.cat([ids["input_ids"].repeat_interleave(times, 0), sequences[:, known:]], dim=1)
    pads = (ids["attention_mask"] == 0).sum(-1).repeat_interleave(times).tolist()
    return ReplayDrafter(whole, pads, VOCABULARY, misses=([0.1, 0.0, 0.5, 0.2] * 2)[: len(whole)])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Sets the clock of stock's `max_time` to 0."""
    return lambda: monkeypatch.setattr(criteria_module, "time", SimpleNamespace(time=Clock().time))


def check(case: dict[str, str], target: Any, head: Any, seed: int, clock: Callable[[], None], into: Tally) -> bool:
    """Run a case both ways; False if stock itself refuses it."""
    make, ids = arguments(case, target, seed)
    clock()
    stock = call(target, seed, **make())
    if stock.error is not None or case["drafter"] == "head":
        drafter: Any = head
    else:
        drafter = replay(case, ids, stock.sequences)
    clock()
    same(call(target, seed, assistant=drafter, **make()), stock)
    if stock.error is None:
        into.add(drafter.last_stats)
    return stock.error is None


def assert_pairs_are_stocks(
    family: str, seed: int, clock: Callable[[], None], into: Tally, make: Callable[[Any], Any] = tiny_head
) -> None:
    """All pairs of options on one family; most of them are what stock itself runs."""
    target = tiny_target(family, seed=seed)
    drafter = make(target)
    cases = pairwise({factor: list(levels) for factor, levels in FACTORS.items()}, seed)
    assert sum(check(case, target, drafter, seed, clock, into) for case in cases) > 0.8 * len(cases)
