"""Calls drawn from a seed - target, prompt, options, arguments, drafter, executor, tree, cache, turns - equal stock's.

In float64. Compared: tokens, dtype, the generator, scores, logits, hidden states, the cache, what streamers and the
user's own processors and criteria were shown; and nothing that was passed in is written to. Where stock raises ours
does, with stock's own kind of error or one sentence.

    pytest tests/exact/test_fuzz_generate.py              240 cases; with -m matrix 3,000 others
    PYTHONPATH=tests python tests/exact/test_fuzz_generate.py SEED INDEX          one case again
    PYTHONPATH=tests python tests/exact/test_fuzz_generate.py SEED --cases 300    300 others
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from support import drawn
from support.called import Tallies, failures_of
from transformers import GenerationConfig, GenerationMixin


def cases_of(seed: int, indices: Iterable[int], drafter: str | None) -> Iterable[tuple[str, dict[str, Any]]]:
    """Cases by the line that runs each again."""
    for index in indices:
        again = f"PYTHONPATH=tests python tests/exact/test_fuzz_generate.py {seed} {index}"
        yield again + (f" --drafter {drafter}" if drafter else ""), drawn.draw(seed, index, drafter)


def many(seed: int, drafter: str | None = None, cases: int = 300) -> None:
    """Hold that many cases of a seed to stock's; enough of them return, and have drafts accepted, to show something."""
    tallies = Tallies()
    failures = failures_of(cases_of(seed, range(cases), drafter), tallies)
    assert not failures, "\n".join([*failures, str(tallies)])
    # Well below what any seed has shown: they tell that something is no longer drawn, not how often it should be.
    assert tallies.kinds["same"] > cases / 2, tallies
    assert tallies.kinds["captured"] > cases / 20, tallies
    if drafter is None:
        assert sum(tau > 1.3 for tau in tallies.taus) > cases / 4, tallies
        assert tallies.kinds["refused"] < cases / 6, tallies
        assert tallies.kinds["both raise"] > cases / 10, tallies


def test_any_call() -> None:
    many(0, cases=240)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_calls(seed: int) -> None:
    many(seed)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("drafter", ["diffusion", "eagle"])
def test_many_calls_of_one_drafter(drafter: str, seed: int) -> None:
    many(seed, drafter)


def test_every_option_and_argument_is_drawn() -> None:
    """A new release of transformers may have others."""
    drawn_fields = {"do_sample", *drawn.SAMPLING, *drawn.FIELDS, *(name for name, _ in drawn.ODD)}
    older = {"_commit_hash"}  # a note of older releases
    assert set(vars(GenerationConfig())) - drawn_fields - older == drawn.ELSEWHERE
    arguments = {
        "self", "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
        "synced_gpus", "assistant_model", "streamer", "negative_prompt_ids", "negative_prompt_attention_mask",
        "custom_generate", "kwargs",
    }  # fmt: skip
    assert set(inspect.signature(GenerationMixin.generate).parameters) == arguments


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("index", type=int, nargs="?")
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--drafter")
    given = parser.parse_args()
    if given.index is not None:
        drawn_case = drawn.draw(given.seed, given.index, given.drafter)
        print(*(f"{name}: {value!r}" for name, value in drawn_case.items()), sep="\n")
    counted = Tallies()
    for one in cases_of(given.seed, range(given.cases) if given.index is None else [given.index], given.drafter):
        print(*failures_of([one], counted), sep="\n", end="", flush=True)
    for what, texts in (("refused", counted.refusals), ("both raise", counted.errors)):
        print(*(f"{what} {count} x: {text}" for text, count in texts.most_common()), sep="\n")
    print(counted)
