"""Choosing at every node in one call is choosing along the path, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_identical
from support.tiny import prompts, tiny_head, tiny_target
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_dart.decoding.processors import scores_alone
from hf_dart.decoding.walk import Accepted, Walker

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
def test_both_walks_give_stocks_tokens(
    mode: str, size: int, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    plain_call, walked = Walker.__call__, []

    def call(self: Walker, *args: Any) -> Accepted:
        self._everywhere = 99 if everywhere else 0
        walked.append(args[0].size)
        return plain_call(self, *args)

    monkeypatch.setattr(Walker, "__call__", call)
    inputs = prompts([7, 3, 9, 5][:size])
    assert_identical(target, head, inputs, max_new_tokens=24, **OPTIONS[mode])
    assert len(walked) > 1
    assert max(walked) > 1


def test_what_may_run_on_all_nodes() -> None:
    cpu, accelerator = torch.device("cpu"), torch.device("cuda")
    alone = LogitsProcessorList([TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)])
    assert scores_alone(alone, cpu)
    sorting = LogitsProcessorList([*alone, TopPLogitsWarper(0.5)])
    assert not scores_alone(sorting, cpu)
    assert scores_alone(sorting, accelerator)
    assert not scores_alone(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2)]), accelerator)

    class Warmer(TemperatureLogitsWarper):
        def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
            return super().__call__(input_ids, scores) * input_ids.shape[1]

    assert not scores_alone(LogitsProcessorList([Warmer(0.5)]), accelerator)


@pytest.mark.parametrize("everywhere", [True, False])
def test_no_token_is_drawn_from_nan(everywhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    inputs = prompts([7, 3])
    target.generate(**inputs, max_new_tokens=2, do_sample=True, assistant=head)  # proved while it was sound
    with torch.no_grad():
        target.lm_head.weight[5] = torch.nan
    plain_call = Walker.__call__

    def call(self: Walker, *args: Any) -> Accepted:
        self._everywhere = 99 if everywhere else 0
        return plain_call(self, *args)

    monkeypatch.setattr(Walker, "__call__", call)
    for options in ({}, {"assistant": head}):
        with pytest.raises(RuntimeError, match=r"inf.*nan"):
            target.generate(**inputs, max_new_tokens=8, do_sample=True, top_k=0, **options)
