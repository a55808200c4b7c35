"""Timed `generate` calls, whether two of them gave the same, and how repetitive that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import frexp, inf
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.decoding.stats import DraftStats, processor_time
from hf_dart.hub.tables import Verdict
from hf_dart.models.devices import generator_state
from hf_dart.models.quantised import rounding_of
from hf_dart.models.tokenizers import end_tokens
from hf_dart.models.tolerance import coarsest, narrow_dtype

T = TypeVar("T")

# A difference is a near-tie where stock's own best two choices lie closer than this: in float32, and in 16 bits
# (in units in the last place of the top logit).
NEAR_TIE, LOW_PRECISION_ULPS = 1e-5, 4


@dataclass(frozen=True)
class Run:
    """One call of `generate` after seeding, and what came of it."""

    model: PreTrainedModel
    inputs: dict[str, Tensor]  # `input_ids` and `attention_mask` [B, P]
    options: dict[str, Any]
    seed: int
    sequences: Tensor  # [B, P + T]
    seconds: float  # wall time of the call
    processor_seconds: float  # of the calling thread
    generator: Tensor  # state of the default generator afterwards
    stats: DraftStats | None  # what the drafter did; None for calls without one

    @property
    def generated(self) -> Tensor:
        """The sequences without their prompts: [B, T]."""
        return self.sequences[:, self.inputs["input_ids"].shape[1] :]

    @property
    def texts(self) -> list[list[int]]:
        """The generated tokens of each row up to its end-of-text token."""
        ends, found = end_tokens(self.model), []
        for row in self.generated.tolist():
            last = next((place for place, token in enumerate(row) if token in ends), len(row))
            found.append(row[: last + 1])
        return found


def run(model: PreTrainedModel, inputs: dict[str, Tensor], options: dict[str, Any], seed: int = 0) -> Run:
    """Seed, call `model.generate(**inputs, **options)`, and time it."""
    device, drafter = inputs["input_ids"].device, options.get("assistant")
    asked = options if drafter is None else {"memory": None, **options}  # nothing of an earlier run
    torch.manual_seed(seed)
    began = processor_time()
    seconds, sequences = timed(device, lambda: model.generate(**inputs, **asked))
    processor_seconds = processor_time() - began
    stats = None if drafter is None else drafter.last_stats
    return Run(model, inputs, options, seed, sequences, seconds, processor_seconds, generator_state(device), stats)


def one_thread(device: torch.device) -> bool:
    """Tell whether one thread of a CPU computes all: its processor time, which other programs change little, counts."""
    return device.type == "cpu" and torch.get_num_threads() == 1


def timed(device: torch.device, call: Callable[[], T]) -> tuple[float, T]:
    """Time a call, and return the seconds and its result; an accelerator is waited for before and after it."""
    wait = torch.get_device_module(device).synchronize
    of = () if device.type == "mps" else (device,)  # of Apple's there is one
    wait(*of)
    start = perf_counter()
    done = call()
    wait(*of)
    return perf_counter() - start, done


@dataclass(frozen=True)
class Difference:
    """The place where two runs of one row part, and how close stock's own choice was there.

    Attributes:
        gap: how much better stock's own token was than the one written instead, in its processed logits, or in log(p /
            noise) when sampling; inf where a run goes on and the other has stopped. In 16 bits, tokens as close as is
            allowed to the edge of what stock's filters kept may be kept or not; of a removed one, how far it lies off.
    """

    position: int  # of the first generated token that differs
    gap: float
    ulp: float  # one unit in the last place of the top logit there, in the model's dtype, or in what it rounds like
    allowed: float  # the largest gap that counts as a near-tie

    @property
    def near_tie(self) -> bool:
        """True if the two choices are no further apart than is allowed."""
        return self.gap <= self.allowed


def compare(stock: Run, other: Run, found: list[Difference | None] | None = None) -> Verdict:
    """Compare a run with stock's, the generator included; by their `differences`, if those are `found` already."""
    if found is None:
        (found,) = differences(stock, other)
    ties = sum(one is not None and one.near_tie for one in found)
    apart = sum(one is not None for one in found) - ties
    same = bool(ties or apart) or torch.equal(stock.generator, other.generator)
    return Verdict(len(found), ties, apart, same)


def differences(stock: Run, *others: Run) -> list[list[Difference | None]]:
    """Find the first difference of each row of each run, None where there is none; an end at another place is one too.

    Where tokens differ, the stock run is repeated, once for all others, to see how close its choices were.
    """
    repeated: _Choices | None = None
    found: list[list[Difference | None]] = []
    for other in others:
        shared = min(stock.generated.shape[1], other.generated.shape[1])
        apart = stock.generated[:, :shared] != other.generated[:, :shared]
        parted: list[Difference | None] = [None] * len(apart)
        if apart.any():
            repeated = repeated or _Choices.of(stock)
            for row in apart.any(1).nonzero()[:, 0].tolist():
                position = int(apart[row].nonzero()[0])
                parted[row] = repeated.difference(row, position, int(other.generated[row, position]))
        elif not torch.equal(stock.sequences, other.sequences):
            # One row's near-tie may change how much padding follows the others, and nothing else.
            parted[0] = Difference(shared, gap=inf, ulp=0.0, allowed=0.0)
        found.append(parted)
    return found


@dataclass(frozen=True)
class _Choices:
    """What a run of stock chose its tokens from."""

    dtype: torch.dtype  # that the logits round like
    logits: tuple[Tensor, ...]  # [B, V] of each token
    scores: tuple[Tensor, ...]  # the same, processed
    seed: int | None  # of what the tokens were drawn with; None if they were not

    @classmethod
    def of(cls, stock: Run) -> _Choices:
        """Repeat a run, and keep its scores."""
        kept = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        torch.manual_seed(stock.seed)
        told = stock.model.generate(**stock.inputs, **stock.options, **kept)
        # Stock returns logits in float32, whatever the model's dtype.
        dtype = coarsest(narrow_dtype(torch.stack(told.logits)) or stock.model.dtype, rounding_of(stock.model))
        config = stock.options.get("generation_config") or stock.model.generation_config
        sampled = stock.options.get("do_sample", config.do_sample)
        return cls(dtype, told.logits, told.scores, stock.seed if sampled else None)

    def difference(self, row: int, position: int, token: int) -> Difference:
        """Return what it means that another run has `token` at a position of a row."""
        scores = self.scores[position].float()
        if self.seed is not None:
            torch.manual_seed(self.seed)
            for _ in range(position + 1):
                noise = torch.empty_like(scores).exponential_(1)
            scores = scores.log_softmax(-1) - noise.log()
        scores, logits = scores[row], self.logits[position][row]
        top = float(logits.max())
        allowed, gap, kept = tolerance(self.dtype, top), scores.max() - scores[token], scores > -inf
        if torch.finfo(self.dtype).bits <= 16 and not kept.all():
            from_edge = (logits - logits[kept].min()).abs()
            best = scores.where(from_edge > allowed, -inf).max()
            gap = (best - scores[token]).clamp(min=0) if kept[token] else from_edge[token]
        return Difference(position, float(gap), ulp(self.dtype, top), allowed)


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
