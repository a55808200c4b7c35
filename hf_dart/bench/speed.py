"""Speed against stock `generate`: all methods in one interleaved run, medians of repeats."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from hf_dart.bench.baselines import COMPILED, takes
from hf_dart.bench.exact import Difference, Run, compare, differences, one_thread, run
from hf_dart.bench.pair import Pair
from hf_dart.decoding.request import FILL
from hf_dart.decoding.stats import DraftStats
from hf_dart.hub.tables import STOCK, Verdict
from hf_dart.models.tokenizers import end_tokens
from hf_dart.models.trial import check_verification

T = TypeVar("T")

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, penalty 1.1": {"do_sample": False, "repetition_penalty": 1.1},
    "sampled, T=1": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "sampled, T=0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0},
    "sampled, top-k 64, top-p 0.95": {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95},
}
_WARMUP_TOKENS = 16


@dataclass(frozen=True)
class Settings:
    """Sizes of a measurement; no batch may be larger than the number of prompts."""

    prompts: int = 8
    prompt_tokens: int = 96  # of the longest
    new_tokens: int = 128  # for each prompt
    repeats: int = 5
    batches: tuple[int, ...] = ()  # prompts that fill none are left out; by default, sizes of 1 and 4 that are filled
    seed: int = 0  # of the sampled runs

    def __post_init__(self) -> None:
        if not self.batches:
            object.__setattr__(self, "batches", tuple(size for size in (1, 4) if size <= self.prompts))
        if max(self.batches) > self.prompts:
            raise ValueError(f"--batch takes sizes from 1 to the number of prompts, {self.prompts}.")


@dataclass
class Measurement:
    """One method in one mode at one batch size; where one thread computes all, times are its processor time."""

    batch: int
    mode: str
    method: str
    compared: bool  # with stock; not where another text is as good
    ours: bool  # whether it is a drafter of ours, whose text has to be stock's
    runs: list[list[Run]] = field(default_factory=list)  # by repeat, one of each batch
    verdict: Verdict = field(default_factory=Verdict)  # of the comparison, over all repeats
    differences: list[Difference | None] = field(default_factory=list)  # from stock, row by row
    peak: int = 0  # bytes allocated on a CUDA device, the highest of all its calls; 0 elsewhere

    @property
    def seconds(self) -> list[float]:
        """Time of each repeat, over all prompts; whole `generate` calls, prefill included."""
        return [sum(self._own(done.processor_seconds, done.seconds) for done in repeat) for repeat in self.runs]

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the drafter, over all repeats."""
        return self._own(self.stats.processor_seconds, self.stats.seconds)

    def _own(self, processor: T, wall: T) -> T:
        return processor if one_thread(self.runs[0][0].model.device) else wall

    @property
    def written(self) -> list[list[int]]:
        """Generated tokens of each row of the last repeat, up to its end-of-text token."""
        return [row for done in self.runs[-1] for row in done.texts]

    @property
    def stats(self) -> DraftStats:
        """Statistics of the drafter, over all repeats."""
        merged = DraftStats()
        for done in chain.from_iterable(self.runs):
            if done.stats is not None:
                merged.merge(done.stats)
        return merged


def in_turn(items: list[T], number: int) -> list[T]:
    """Return all methods, another one first at every `number`, so that a busy machine slows down all alike."""
    first = number % len(items)
    return items[first:] + items[:first]


def measure(
    pair: Pair,
    prompts: list[list[int]],
    settings: Settings,
    methods: Mapping[str, dict[str, Any]],
    modes: Mapping[str, dict[str, Any]] = MODES,
    quiet: bool = True,
) -> list[Measurement]:
    """Run all methods on all prompts, `settings.repeats` times, and compare what they wrote.

    Methods (such as `baselines.methods` gives) and modes are options of `generate` by name; stock's own is always
    measured. Within each repeat the methods take turns prompt by prompt (`in_turn`).
    """
    drafting: dict[str, dict[str, Any]] = {STOCK: {}, **methods}
    measurements = []
    for batch, (mode, options), method in product(settings.batches, modes.items(), drafting):
        if takes(drafting[method], batch, options):
            # Stock's assisted sampling draws other numbers, and writes another text.
            other = method == STOCK or (options["do_sample"] and "assistant_model" in drafting[method])
            ours = "assistant" in drafting[method]
            measurements.append(Measurement(batch, mode, method, not other, ours))
    groups = {
        batch: [
            pad_left(prompts[start : start + batch], pad_token(pair), pair.model.device)
            for start in range(0, len(prompts) - batch + 1, batch)
        ]
        for batch in settings.batches
    }
    for inputs in chain.from_iterable(groups.values()) if any(one.ours for one in measurements) else ():
        mask = inputs["attention_mask"]
        # What such a call has to try first, once per process, is not timed.
        check_verification(pair.model, mask.shape[1] + settings.new_tokens, FILL, len(mask), bool((mask == 0).any()))
    plan: list[tuple[Measurement, dict[str, Tensor], int, int | None]] = []
    for one in measurements:
        one.runs = [[] for _ in range(settings.repeats)]
        # Each length is compiled by itself, so compiled methods warm up on all prompts.
        compiled = one.method in COMPILED
        short = settings.new_tokens if compiled else min(_WARMUP_TOKENS, settings.new_tokens)
        plan += [(one, inputs, short, None) for inputs in groups[one.batch][: None if compiled else 1]]
    for repeat, (batch, mode) in product(range(settings.repeats), product(settings.batches, modes)):
        rows = [one for one in measurements if (one.batch, one.mode) == (batch, mode)]
        for number, inputs in enumerate(groups[batch]):
            plan += [(one, inputs, settings.new_tokens, repeat) for one in in_turn(rows, repeat + number)]
    device, on_cuda = pair.model.device, pair.model.device.type == "cuda"
    seldom = 0.1 if sys.stderr.isatty() else 10  # seconds between two lines of progress
    bar = tqdm(plan, unit="call", disable=quiet, dynamic_ncols=True, mininterval=seldom)
    for one, inputs, new_tokens, timed in bar:
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        options = {**modes[one.mode], **drafting[one.method], "max_new_tokens": new_tokens}
        options["tokenizer"] = pair.tokenizer  # for stop_strings of the target's generation_config
        done = run(pair.model, inputs, options, settings.seed)
        if timed is not None:
            one.runs[timed].append(done)
            one.peak = max(one.peak, torch.cuda.max_memory_allocated(device)) if on_cuda else 0
    for stock in [one for one in measurements if one.method == STOCK]:
        alike = (one for one in measurements if (one.batch, one.mode) == (stock.batch, stock.mode))
        others = [one for one in alike if one.compared]
        calls = zip(*(chain.from_iterable(one.runs) for one in (stock, *others)), strict=True)
        for theirs, *drafted in calls:
            for one, other, found in zip(others, drafted, differences(theirs, *drafted), strict=True):
                one.verdict += compare(theirs, other, found)
                one.differences += found
    return measurements


def answer(pair: Pair, prompt: list[int], new_tokens: int) -> list[int]:
    """Return the target's own greedy answer to a prompt, which the head drafts."""
    options = {**MODES["greedy"], "max_new_tokens": new_tokens, "assistant": pair.head, "tokenizer": pair.tokenizer}
    return run(pair.model, pad_left([prompt], pad_token(pair), pair.model.device), options).texts[0]


def pad_left(prompts: list[list[int]], pad: int, device: torch.device) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` [B, P] of prompts of different lengths."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def pad_token(pair: Pair) -> int:
    """Return the token that fills up the shorter prompts of a batch."""
    known = (pair.model.generation_config.pad_token_id, *end_tokens(pair.model), 0)
    return next(int(token) for token in known if token is not None)
