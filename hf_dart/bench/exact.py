"""One timed `generate` call, whether two of them gave the same, and how repetitive that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import frexp, inf
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.decoding.stats import DraftStats
from hf_dart.models.devices import generator_state
from hf_dart.models.quantised import rounding_of
from hf_dart.models.tolerance import coarsest, narrow_dtype
from hf_dart.view.tables import Verdict

T = TypeVar("T")

NEAR_TIE = 1e-5
"""A float32 difference is a near-tie if stock's own best two choices lie closer than this there."""
LOW_PRECISION_ULPS = 4
"""A bfloat16 or float16 difference is a near-tie up to so many units in the last place of the top logit."""


@dataclass(frozen=True)
class Run:
    """The result of one call, and what it left.

    Attributes:
        sequences: [B, P + T].
        seconds: wall time of the call.
        generator: state of the default generator afterwards.
        stats: what the drafter did; None for calls without one.
    """

    sequences: Tensor
    seconds: float
    generator: Tensor
    stats: DraftStats | None


def run(model: PreTrainedModel, inputs: dict[str, Tensor], options: dict[str, Any], seed: int = 0) -> Run:
    """Seed, call `model.generate(**inputs, **options)`, and time it."""
    device = inputs["input_ids"].device
    torch.manual_seed(seed)
    seconds, sequences = timed(device, lambda: model.generate(**inputs, **options))
    drafter = options.get("assistant")
    return Run(sequences, seconds, generator_state(device), None if drafter is None else drafter.last_stats)


def timed(device: torch.device, call: Callable[[], T]) -> tuple[float, T]:
    """Time a call, and return the seconds and its result; an accelerator is waited for before and after it."""
    _synchronize(device)
    start = perf_counter()
    done = call()
    _synchronize(device)
    return perf_counter() - start, done


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


@dataclass(frozen=True)
class Difference:
    """The place where two runs of one row part, and how close stock's own choice was there.

    Attributes:
        position: of the first generated token that differs.
        gap: how much better stock's own token was than the one written instead, in its processed logits, or in
            log(p / noise) when sampling; inf where a run goes on and the other has stopped.
        top2: the same of stock's two best tokens.
        ulp: one unit in the last place of the top logit there, in the model's dtype, or in what it rounds like.
        allowed: the largest gap that counts as a near-tie.
    """

    position: int
    gap: float
    top2: float
    ulp: float
    allowed: float

    @property
    def near_tie(self) -> bool:
        """True if stock's own two best choices are no further apart than is allowed."""
        return self.gap <= self.allowed


def verdict(found: list[Difference | None], stock: Run, other: Run) -> Verdict:
    """Return the verdict on two runs whose `run_differences` are `found`."""
    ties = sum(one is not None and one.near_tie for one in found)
    apart = sum(one is not None for one in found) - ties
    return Verdict(len(found), ties, apart, torch.equal(stock.generator, other.generator))


def differences(
    model: PreTrainedModel, inputs: dict[str, Tensor], options: dict[str, Any], seed: int, stock: Tensor, other: Tensor
) -> list[Difference | None]:
    """Return the first difference of each row; None for rows that agree as far as both go.

    Args:
        options: those of the stock run; where tokens differ it is repeated, to see how close its choices were.
        stock, other: [B, T] generated tokens, the prompts left out; their lengths may differ.
    """
    positions = [_first_difference(left, right) for left, right in zip(stock, other, strict=True)]
    if not any(position is not None for position in positions):
        return [None] * len(positions)
    torch.manual_seed(seed)
    told = model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True, output_logits=True)
    # Stock returns logits in float32, whatever the model's dtype.
    dtype = coarsest(narrow_dtype(torch.stack(told.logits)) or model.dtype, rounding_of(model))
    found: list[Difference | None] = []
    for row, position in enumerate(positions):
        if position is None:
            found.append(None)
            continue
        scores = told.scores[position].float()
        if options.get("do_sample"):
            torch.manual_seed(seed)
            for _ in range(position + 1):
                noise = torch.empty_like(scores).exponential_(1)
            scores = scores.log_softmax(-1) - noise.log()
        top = float(told.logits[position][row].max())
        best, second = scores[row].topk(2).values.tolist()
        gap = best - float(scores[row, other[row, position]])
        found.append(Difference(position, gap, best - second, ulp(dtype, top), tolerance(dtype, top)))
    return found


def compare(
    model: PreTrainedModel, inputs: dict[str, Tensor], options: dict[str, Any], seed: int, stock: Run, other: Run
) -> Verdict:
    """Compare a run with stock's, token for token and in the state of the generator.

    Args:
        options: those of the stock run; where tokens differ it is repeated, to see how close its choice was.
    """
    return verdict(run_differences(model, inputs, options, seed, stock, other), stock, other)


def run_differences(
    model: PreTrainedModel, inputs: dict[str, Tensor], options: dict[str, Any], seed: int, stock: Run, other: Run
) -> list[Difference | None]:
    """`differences` of whole runs: an end at another place is one too."""
    if torch.equal(stock.sequences, other.sequences):
        return [None] * len(stock.sequences)
    prompt = inputs["input_ids"].shape[1]
    found = differences(model, inputs, options, seed, stock.sequences[:, prompt:], other.sequences[:, prompt:])
    # One row's near-tie may change how much padding follows the others, and nothing else.
    if not any(found):
        shorter = min(stock.sequences.shape[1], other.sequences.shape[1]) - prompt
        found[0] = Difference(shorter, gap=inf, top2=inf, ulp=0.0, allowed=0.0)
    return found


def _first_difference(left: Tensor, right: Tensor) -> int | None:
    shared = min(len(left), len(right))
    apart = (left[:shared] != right[:shared]).nonzero()
    return int(apart[0]) if len(apart) else None


def tolerance(dtype: torch.dtype, logit: float) -> float:
    """Return the largest gap of a near-tie: 0 in float64, `NEAR_TIE` in float32, 4 ulp of the top logit in 16 bits."""
    if dtype == torch.float64:
        return 0.0
    if dtype == torch.float32:
        return NEAR_TIE
    return LOW_PRECISION_ULPS * ulp(dtype, logit)


def ulp(dtype: torch.dtype, value: float) -> float:
    """Return the distance of neighbouring numbers of `dtype` at the size of `value`."""
    return torch.finfo(dtype).eps * 2.0 ** (frexp(value)[1] - 1)


def repeated_4grams(rows: list[list[int]]) -> float:
    """Share of the 4-grams of all rows that occurred before in their row."""
    total = distinct = 0
    for row in rows:
        grams = list(zip(row, row[1:], row[2:], row[3:], strict=False))
        total += len(grams)
        distinct += len(set(grams))
    return 1 - distinct / total if total else 0.0
