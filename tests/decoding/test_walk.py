"""Choosing at every node in one call is choosing along the path, token by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.compare import assert_identical, run, same
from support.tiny import VOCABULARY, prompts, tiny_head, tiny_target
from support.trees import choose_everywhere
from support.users import Clock
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation import stopping_criteria as criteria_module

from hf_dart.decoding.processors import scores_alone

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "T=1": {"do_sample": True, "top_k": 0},
    "T=.7, top-k": {"do_sample": True, "temperature": 0.7, "top_k": 12},
    "suppressed": {"do_sample": True, "top_k": 0, "suppress_tokens": [4, 9]},
    "top-p": {"do_sample": True, "top_k": 0, "top_p": 0.7},
    "top-h": {"do_sample": True, "top_k": 0, "top_h": 0.6},
    "min-p": {"do_sample": True, "top_k": 0, "min_p": 0.05},
    "typical": {"do_sample": True, "top_k": 0, "typical_p": 0.7},
    "epsilon": {"do_sample": True, "top_k": 0, "epsilon_cutoff": 0.02},
    "eta": {"do_sample": True, "top_k": 0, "eta_cutoff": 0.02},
}


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("mode", OPTIONS)
def test_both_walks_give_stocks_tokens(mode: str, size: int, everywhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    if everywhere:
        choose_everywhere(monkeypatch)
    inputs = prompts([7, 3, 9, 5][:size])
    assert_identical(target, head, inputs, max_new_tokens=24, **OPTIONS[mode])
    assert head.last_stats.drafted > 0


def test_what_may_run_on_all_nodes() -> None:
    alone = LogitsProcessorList([TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)])
    assert scores_alone(alone)
    assert not scores_alone(LogitsProcessorList([*alone, RepetitionPenaltyLogitsProcessor(1.2)]))

    class Warmer(TemperatureLogitsWarper):
        def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
            return super().__call__(input_ids, scores) * input_ids.shape[1]

    assert not scores_alone(LogitsProcessorList([Warmer(0.5)]))


class Warming(TemperatureLogitsWarper):
    """Another temperature at every call."""

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        self.temperature = 0.5 if self.temperature == 2.0 else 2.0
        return super().__call__(input_ids, scores)


class Together(EosTokenCriteria):
    """One row's end is that of all."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Tensor:
        ends = super().__call__(input_ids, scores, **kwargs)
        return ends.any() & torch.ones_like(ends)


def write_into(ids: Tensor, scores: Tensor) -> Tensor:
    ids[:, -1] = (ids[:, -1] + ids.shape[1] % 3) % VOCABULARY
    return scores


class Writes(StoppingCriteria):
    """Another token in the place of the one that was chosen, now and then; the target reads that one."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        write_into(input_ids, scores)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    "own",
    [
        lambda: {"logits_processor": [Warming(2.0)]},
        lambda: {"stopping_criteria": [Together([3, 11])], "pad_token_id": 0},
        lambda: {"max_time": 5.5},
        lambda: {"logits_processor": [lambda ids, scores: write_into(ids, scores)]},
        lambda: {"stopping_criteria": [Writes()]},
    ],
    ids=["a warper", "an end", "the time", "a processor that writes into the text", "a criterion that does"],
)
def test_what_may_do_anything_is_called_as_stock_calls_it(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per position, on the whole batch."""
    target = tiny_target("llama")
    head = tiny_head(target)
    inputs, options = prompts([7, 3, 9, 5]), {"do_sample": True, "top_k": 0, "max_new_tokens": 24}
    found = []
    for drafting in ({}, {"assistant": head}):
        monkeypatch.setattr(criteria_module, "time", SimpleNamespace(time=Clock().time))
        found.append(run(target, inputs, 0, **options, **own(), **drafting))
    same(*reversed(found))


@pytest.mark.parametrize("way", ["everywhere", "by token", "in step"])
def test_tokens_that_float32_cannot_tell_apart(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock compares scores as float32, where the first of equal ones is chosen."""
    target = tiny_target("llama")
    with torch.no_grad():
        weight = target.lm_head.weight
        weight[1::2] = weight[::2] * (1 + 1e-12)
    head = tiny_head(target)
    inputs, options = prompts([7, 3]), {"do_sample": False, "max_new_tokens": 24}
    if way == "everywhere":
        choose_everywhere(monkeypatch)
    if way == "in step":
        options |= {"return_dict_in_generate": True, "output_scores": True}
    stock, _ = assert_identical(target, head, inputs, **options)
    assert not (stock.sequences[:, 7:] % 2).any(), "of each pair, the first was to be chosen"


@pytest.mark.parametrize("everywhere", [True, False])
def test_no_token_is_drawn_from_nan(everywhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    inputs = prompts([7, 3])
    target.generate(**inputs, max_new_tokens=2, do_sample=True, assistant=head)  # tried while it was sound
    with torch.no_grad():
        target.lm_head.weight[5] = torch.nan
    if everywhere:
        choose_everywhere(monkeypatch)
    for options in ({}, {"assistant": head}):
        with pytest.raises(RuntimeError, match=r"inf.*nan"):
            target.generate(**inputs, max_new_tokens=8, do_sample=True, top_k=0, **options)
