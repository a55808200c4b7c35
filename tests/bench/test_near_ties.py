"""Comparing two runs: where they part, and how close stock's own choice was there."""

from __future__ import annotations

from dataclasses import replace
from math import isinf
from typing import Any

import pytest
import torch
from support.tiny import VOCABULARY, prompts, tiny_target
from transformers import GenerationConfig

from hf_dart.bench.exact import Difference, _Choices, compare, differences, repeated_4grams, run, timed, tolerance, ulp


def test_a_generator_left_elsewhere_is_a_difference() -> None:
    one = run(tiny_target("llama"), prompts([6]), {"do_sample": False, "max_new_tokens": 4})
    torch.rand(1)
    assert compare(one, one).identical
    assert not compare(one, replace(one, generator=torch.get_rng_state())).identical


def test_near_ties_are_a_matter_of_dtype() -> None:
    assert tolerance(torch.float64, 20.0) == 0
    assert tolerance(torch.float32, 20.0) == 1e-5
    assert tolerance(torch.bfloat16, 20.0) == 4 * 2.0**-7 * 16
    for value in (0.3, 1.0, 20.0, 250.0):
        step = torch.tensor(value, dtype=torch.bfloat16)
        assert float(torch.nextafter(step, step * 2) - step) == ulp(torch.bfloat16, float(step))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("by", ["keyword", "config"])
def test_gap_is_to_the_token_that_was_written(sampled: bool, by: str) -> None:
    model = tiny_target("llama")
    inputs = prompts([6])
    options: dict[str, Any] = {"do_sample": sampled, "max_new_tokens": 6, **({"top_k": 0} if sampled else {})}
    if by == "config":  # as TRL does
        options = {"generation_config": GenerationConfig(**options)}
    stock = run(model, inputs, options, seed=3)
    other = stock.sequences.clone()
    token = int(other[0, 9] + 1) % VOCABULARY
    other[0, 9:] = token
    ((found,),) = differences(stock, replace(stock, sequences=other))
    assert found.position == 3

    with torch.no_grad():
        logits = model(stock.sequences[:, :9]).logits[0, -1]
    scores = logits.float()
    if sampled:
        torch.manual_seed(3)
        noise = [torch.empty(1, VOCABULARY).exponential_(1) for _ in range(4)][3][0]
        scores = scores.log_softmax(-1) - noise.log()
    best = scores.sort(descending=True).values
    assert int(scores.argmax()) == int(stock.sequences[0, 9])
    assert found.gap == pytest.approx((best[0] - scores[token]).item(), abs=1e-5)
    assert found.ulp == ulp(torch.float64, logits.max().item())
    assert not found.near_tie


@pytest.mark.parametrize(("dtype", "soft"), [(torch.bfloat16, True), (torch.float32, False)])
def test_the_edge_of_what_filters_keep_is_soft_in_16_bits(dtype: torch.dtype, soft: bool) -> None:
    """What rounding may bring in or leave out, and nothing else: 4 ulp are 0.25 here."""
    logits = torch.tensor([[8.0, 7.0, 6.875, 3.0, 7.75]])
    races = torch.tensor([[1.0, 9.0, -torch.inf, -torch.inf, 0.9]])  # the edge is at token 1, which won
    choices = _Choices(dtype, (logits,), (races,), seed=None)
    brought_in, far_off, second, third = (choices.difference(0, 0, token) for token in (2, 3, 0, 4))
    assert [brought_in.near_tie, far_off.near_tie, second.near_tie, third.near_tie] == [soft, False, soft, soft]
    races[0, 4] = 0.5
    third = choices.difference(0, 0, 4)
    assert not third.near_tie
    assert (brought_in.gap, far_off.gap, second.gap, third.gap) == (
        (0.125, 4.0, 0.0, 0.5) if soft else (torch.inf, torch.inf, 8.0, 8.5)
    )


@pytest.mark.parametrize("sampled", [False, True])
def test_stock_is_repeated_once_for_all(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target("llama")
    options: dict[str, Any] = {"do_sample": sampled, "max_new_tokens": 6, **({"top_k": 0} if sampled else {})}
    stock = run(model, prompts([6, 4]), options, seed=3)
    others = []
    for row, place in ((0, 9), (1, 7)):
        other = stock.sequences.clone()
        other[row, place] = (other[row, place] + 1) % VOCABULARY
        others.append(replace(stock, sequences=other))
    apart = [differences(stock, other)[0] for other in others]
    seeds, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda **given: (seeds.append(torch.initial_seed()), generate(**given))[1])
    assert differences(stock, stock, *others) == [[None, None], *apart]
    assert seeds == [3]
    assert [[one and one.position for one in rows] for rows in apart] == [[3, None], [None, 1]]


def test_an_end_at_another_place_is_no_near_tie() -> None:
    model = tiny_target("llama")
    inputs = prompts([6, 4])
    stock = run(model, inputs, {"do_sample": False, "max_new_tokens": 6})
    short = run(model, inputs, {"do_sample": False, "max_new_tokens": 5})
    (found,) = differences(stock, short)
    assert isinstance(found[0], Difference)
    assert isinf(found[0].gap)
    assert not found[0].near_tie
    assert found[1] is None


def test_repeated_4grams() -> None:
    assert repeated_4grams([[1, 2, 3, 4, 5]]) == 0
    assert repeated_4grams([[1, 1, 1, 1, 1, 1]]) == pytest.approx(2 / 3)
    assert repeated_4grams([[1, 2, 3]]) == 0


def test_apple_gpus_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which there is one: `torch.mps.synchronize` takes no device."""
    waits = list[None]()
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waits.append(None))
    assert timed(torch.device("mps"), lambda: len(waits))[1] == 1
    assert len(waits) == 2
