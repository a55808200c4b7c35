"""One timed `generate` call, whether two of them gave the same, and how repetitive that is."""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hf_dart.generation.stats import DraftStats

NEAR_TIE = 1e-5
"""A float32 difference is a near-tie if stock's own best two choices lie closer than this there."""


@dataclass(frozen=True)
class Run:
    """What a call returned and left behind.

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


def run(model: Any, inputs: dict[str, Tensor], options: dict[str, Any], seed: int = 0) -> Run:
    """Seed, call `model.generate(**inputs, **options)`, and time it."""
    device = inputs["input_ids"].device
    torch.manual_seed(seed)
    synchronize(device)
    start = perf_counter()
    sequences = model.generate(**inputs, **options)
    synchronize(device)
    seconds = perf_counter() - start
    drafter = options.get("assistant")
    return Run(sequences, seconds, _generator_state(device), None if drafter is None else drafter.last_stats)


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator; timings of work in flight mean nothing."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _generator_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


@dataclass(frozen=True)
class Verdict:
    """How two runs compare.

    Attributes:
        rows: rows compared.
        near_ties: rows that part at a near-tie of stock's own choice.
        differences: rows that part elsewhere.
        generator: the generator was left in the same state (after a near-tie it need not be).
    """

    rows: int = 0
    near_ties: int = 0
    differences: int = 0
    generator: bool = True

    @property
    def identical(self) -> bool:
        """Token for token the same, near-ties apart, generator included."""
        return not self.differences and (self.generator or self.near_ties > 0)

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(
            self.rows + other.rows,
            self.near_ties + other.near_ties,
            self.differences + other.differences,
            self.generator and other.generator,
        )

    def __str__(self) -> str:
        if not self.identical:
            return "no"
        return f"yes, but for {self.near_ties} near-ties" if self.near_ties else "yes"


def compare(
    model: Any, inputs: dict[str, Tensor], options: dict[str, Any], seed: int, stock: Run, other: Run
) -> Verdict:
    """Compare a run with stock's, token for token and in the state of the generator.

    Args:
        options: those of the stock run; where tokens differ it is repeated, to see how close its choice was.
    """
    generator = torch.equal(stock.generator, other.generator)
    rows = len(stock.sequences)
    if torch.equal(stock.sequences, other.sequences):
        return Verdict(rows, generator=generator)
    prompt = inputs["input_ids"].shape[1]
    near_ties = differences = 0
    for row in range(rows):
        position = _first_difference(stock.sequences[row, prompt:], other.sequences[row, prompt:])
        if position is None:
            continue
        if _is_near_tie(model, inputs, options, seed, row, position):
            near_ties += 1
        else:
            differences += 1
    # One row's near-tie can change how much padding stands behind the others; nothing else may.
    if not near_ties and not differences:
        differences = 1
    return Verdict(rows, near_ties, differences, generator)


def _first_difference(left: Tensor, right: Tensor) -> int | None:
    shared = min(len(left), len(right))
    apart = (left[:shared] != right[:shared]).nonzero()
    return int(apart[0]) if len(apart) else None


def _is_near_tie(
    model: Any, inputs: dict[str, Tensor], options: dict[str, Any], seed: int, row: int, position: int
) -> bool:
    """Were stock's two best choices of this token as good as equal, in logits or in log(p / noise)?"""
    torch.manual_seed(seed)
    output = model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
    scores = output.scores[position].float()
    if options.get("do_sample"):
        torch.manual_seed(seed)
        for _ in range(position + 1):
            noise = torch.empty_like(scores).exponential_(1)
        scores = scores.log_softmax(-1) - noise.log()
    best, second = scores[row].topk(2).values.tolist()
    return best - second <= tolerance(model.dtype, best)


def tolerance(dtype: torch.dtype, score: float) -> float:
    """How close a near-tie is: nothing in float64, `NEAR_TIE` in float32, 4 ulp of the score in 16 bits."""
    if dtype == torch.float64:
        return 0.0
    if dtype == torch.float32:
        return NEAR_TIE
    return 4 * torch.finfo(dtype).eps * 2.0 ** (frexp(score)[1] - 1)


def repeated_4grams(rows: list[list[int]]) -> float:
    """Share of the 4-grams of all rows that occurred before in their row."""
    total = distinct = 0
    for row in rows:
        grams = list(zip(row, row[1:], row[2:], row[3:], strict=False))
        total += len(grams)
        distinct += len(set(grams))
    return 1 - distinct / total if total else 0.0
