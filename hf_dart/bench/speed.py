"""Speed against stock `generate`: all methods in one interleaved run, medians of repeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_dart.bench.baselines import COMPILED, claims_same_text, is_ours, takes
from hf_dart.bench.exact import Run, compare, run
from hf_dart.bench.pair import Pair
from hf_dart.bench.peak_memory import peak_bytes, reset_peak
from hf_dart.decoding.stats import DraftStats
from hf_dart.view.tables import STOCK, Verdict

T = TypeVar("T")

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, penalty 1.1": {"do_sample": False, "repetition_penalty": 1.1},
    "sampled, T=1": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "sampled, T=0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0},
}
_WARMUP_TOKENS = 16


@dataclass(frozen=True)
class Settings:
    """Sizes of a measurement.

    Args:
        prompts: how many.
        prompt_tokens: most tokens of a prompt.
        new_tokens: generated per prompt.
        repeats: how often everything is run.
        batches: batch sizes; prompts that fill no batch are left out. None given: those of 1 and 4 that prompts fill.
        seed: of the sampled runs.

    Raises:
        ValueError: a number is out of range.
    """

    prompts: int = 8
    prompt_tokens: int = 96
    new_tokens: int = 128
    repeats: int = 5
    batches: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_tokens", "new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; give 1 or more.")
        if not self.batches:
            object.__setattr__(self, "batches", tuple(size for size in (1, 4) if size <= self.prompts))
        if min(self.batches) < 1 or max(self.batches) > self.prompts:
            raise ValueError(f"--batch takes sizes from 1 to the number of prompts, {self.prompts}.")


@dataclass
class Measurement:
    """One method in one mode at one batch size.

    Attributes:
        seconds: of each repeat, over all prompts; whole `generate` calls, prefill included.
        written: generated tokens of each row of the last repeat, padding left out.
        peak: bytes, the highest of all its calls.
        verdict: comparison with stock, over all repeats; None where another text is as good.
        ours: whether it is a drafter of ours, whose text has to be stock's.
        stats: what the drafter did, over all repeats.
    """

    batch: int
    mode: str
    method: str
    seconds: list[float] = field(default_factory=list)
    written: list[list[int]] = field(default_factory=list)
    peak: int = 0
    verdict: Verdict | None = None
    ours: bool = False
    stats: DraftStats = field(default_factory=DraftStats)

    @property
    def tokens(self) -> int:
        """Tokens that one repeat generates."""
        return sum(map(len, self.written))

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each repeat."""
        return [self.tokens / seconds for seconds in self.seconds]

    @property
    def round_ms(self) -> dict[str, float]:
        """Milliseconds per round of each phase but the prefill; `rest` is all time outside phases.

        That is the loop's own time and what transformers prepares before it.
        """
        if not self.stats.rounds:
            return {}
        spent = {name: seconds for name, seconds in self.stats.seconds.items() if name != "prefill"}
        spent["rest"] = sum(self.seconds) - sum(self.stats.seconds.values())
        return {name: 1000 * seconds / self.stats.rounds for name, seconds in spent.items()}

    @property
    def not_forward(self) -> float | None:
        """Share of the round that is neither the drafter's nor the target's forward pass; None without rounds."""
        spent = self.round_ms
        if not spent:
            return None
        return 1 - (spent["draft"] + spent["verify"]) / sum(spent.values())

    @property
    def identical(self) -> bool:
        """True if the text equals stock's, or was not compared."""
        return self.verdict is None or self.verdict.identical

    def add(self, done: Run, peak: int, texts: list[list[int]]) -> None:
        """Add one call of the current repeat, and the text of each row."""
        self.seconds[-1] += done.seconds
        self.written += texts
        self.peak = max(self.peak, peak)
        if done.stats is not None:
            self.stats.merge(done.stats)


def in_turn(items: list[T], number: int) -> list[T]:
    """Return all methods, another one first at every `number`, so that a busy machine slows down all alike."""
    first = number % len(items)
    return items[first:] + items[:first]


def measure(
    pair: Pair,
    prompts: list[list[int]],
    settings: Settings,
    methods: Mapping[str, dict[str, Any]],
    progress: Callable[[int, int], object] = lambda done, calls: None,
    modes: Mapping[str, dict[str, Any]] = MODES,
) -> list[Measurement]:
    """Run all methods on all prompts, `settings.repeats` times, and compare what they wrote.

    Args:
        prompts: token ids.
        methods: options of `generate` by name, such as `baselines.methods` gives; stock's own is always measured.
        modes: options of all of them by name.
        progress: told after every call how many are done, and how many there are, those that warm up included.

    Within each repeat the methods take turns prompt by prompt (`in_turn`).
    """
    drafting: dict[str, dict[str, Any]] = {STOCK: {}, **methods}
    measurements = [
        Measurement(
            batch,
            mode,
            method,
            verdict=Verdict() if method != STOCK and claims_same_text(drafting[method], options["do_sample"]) else None,
            ours=is_ours(drafting[method]),
        )
        for batch in settings.batches
        for mode, options in modes.items()
        for method in drafting
        if takes(drafting[method], batch, options)
    ]
    groups = {
        batch: [
            pad_left(prompts[start : start + batch], pad_token(pair), pair.model.device)
            for start in range(0, len(prompts) - batch + 1, batch)
        ]
        for batch in settings.batches
    }
    # Each length is compiled by itself, so compiled methods warm up on all prompts.
    warming = [groups[one.batch] if one.method in COMPILED else groups[one.batch][:1] for one in measurements]
    calls = sum(map(len, warming)) + settings.repeats * sum(len(groups[one.batch]) for one in measurements)
    done = count(1)

    def call(one: Measurement, inputs: dict[str, Tensor], new_tokens: int) -> Run:
        options = {**modes[one.mode], **drafting[one.method], "max_new_tokens": new_tokens}
        ran = run(pair.model, inputs, options, settings.seed)
        progress(next(done), calls)
        return ran

    for one, inputs_of in zip(measurements, warming, strict=True):
        short = settings.new_tokens if one.method in COMPILED else min(_WARMUP_TOKENS, settings.new_tokens)
        for inputs in inputs_of:
            call(one, inputs, short)
    for repeat in range(settings.repeats):
        for one in measurements:
            one.seconds.append(0.0)
            one.written = []
        for batch, mode in {(one.batch, one.mode): None for one in measurements}:
            rows = [one for one in measurements if (one.batch, one.mode) == (batch, mode)]
            options = {**modes[mode], "max_new_tokens": settings.new_tokens}
            for number, inputs in enumerate(groups[batch]):
                runs = {}
                for one in in_turn(rows, repeat + number):
                    reset_peak(pair.model.device)
                    runs[one.method] = call(one, inputs, settings.new_tokens)
                    one.add(runs[one.method], peak_bytes(pair.model.device), _texts(pair, inputs, runs[one.method]))
                for one in rows:
                    if one.verdict is not None:
                        ours, stock = runs[one.method], runs[STOCK]
                        one.verdict += compare(pair.model, inputs, options, settings.seed, stock, ours)
    return measurements


def pad_left(prompts: list[list[int]], pad: int, device: torch.device) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` [B, P] of prompts of different lengths."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def pad_token(pair: Pair) -> int:
    """Return the token that fills up the shorter prompts of a batch."""
    known = (pair.model.generation_config.pad_token_id, pair.tokenizer.pad_token_id, *_eos_tokens(pair), 0)
    return next(int(token) for token in known if token is not None)


def _eos_tokens(pair: Pair) -> list[int]:
    eos = pair.model.generation_config.eos_token_id
    return [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [int(eos)]


def _texts(pair: Pair, inputs: dict[str, Tensor], done: Run) -> list[list[int]]:
    """Return the generated tokens of each row up to its end-of-text token."""
    eos = set(_eos_tokens(pair))
    texts = []
    for row in done.sequences[:, inputs["input_ids"].shape[1] :].tolist():
        end = next((place + 1 for place, token in enumerate(row) if token in eos), len(row))
        texts.append(row[:end])
    return texts
