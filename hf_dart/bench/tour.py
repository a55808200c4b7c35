"""`hf-dart demo`: the same text with and without the head, and what the drafts were worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from textwrap import fill
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_dart.bench.exact import compare, repeated_4grams, run
from hf_dart.bench.pair import Pair
from hf_dart.decoding.stats import DraftStats
from hf_dart.view.page import origins
from hf_dart.view.tables import Verdict

# Beginnings of Python files, written for this demo: in no training corpus.
PROMPTS = (
    '''"""Reading and writing the station logs of a tide gauge."""

import csv
import os
from pathlib import Path


class StationLog:
    """The readings of one station, oldest first."""

    def __init__(self, path):
        self.path = Path(path)
        self.readings = []

    def load(self):''',
    """import argparse
import sys


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description="Sort recipe cards by season.")
    parser.add_argument("folder", help="where the cards lie")
    parser.add_argument(""",
    """class TestOrchardMap:
    def test_empty_rows(self):
        rows = plant_rows(0)
        assert rows == []

    def test_single_row(self):
        rows = plant_rows(1)
        assert len(rows) == 1

    def test_""",
)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled at T = 0.8": {"do_sample": True, "temperature": 0.8, "top_k": 0},
}
_GREEN, _DIM, _BOLD, _PLAIN = "\033[32m", "\033[2m", "\033[1m", "\033[0m"
_WIDTH = 79  # columns of what the demo says; the model's text runs as it will
_WARMUP_TOKENS = 12
_TRIAL_FORWARDS = 20


@dataclass
class _Sums:
    """Sums over the runs of one mode."""

    stock_seconds: float = 0.0
    seconds: float = 0.0
    texts: list[list[int]] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    stats: DraftStats = field(default_factory=DraftStats)


def demo(
    pair: Pair,
    *,
    new_tokens: int = 96,
    seed: int = 0,
    color: bool = False,
    prompts: tuple[str, ...] = PROMPTS,
    show: Callable[[str], object] = print,
) -> bool:
    """Run the demo and print it with `show`, line by line.

    Args:
        new_tokens: generated per prompt and run.
        seed: of the sampled runs.
        color: use ANSI colours.

    Returns:
        Whether every drafted output was stock's, token for token, and sampling left the generator alike.
    """

    def pen(code: str, text: str) -> str:
        # A reset at each line's end keeps pagers and copies clean.
        return "\n".join(f"{code}{line}{_PLAIN}" if line and color else line for line in text.split("\n"))

    model, head, tokenizer = pair.model, pair.head, pair.tokenizer
    show(fill(_headline(pair), _WIDTH))
    if color:
        show(f"{pen(_DIM, 'prompt')} · {pen(_GREEN, 'accepted draft tokens')} · the target's own tokens")
    else:
        show("(in a terminal, or with --color, accepted draft tokens are green)")

    encoded = [tokenizer(prompt, return_tensors="pt").to(model.device) for prompt in prompts]
    encoded = [{name: one[name] for name in ("input_ids", "attention_mask")} for one in encoded]
    for options in MODES.values():
        for drafting in ({}, {"assistant": head}):
            run(model, encoded[0], {**options, **drafting, "max_new_tokens": _WARMUP_TOKENS})
    sums = {}
    for mode, options in MODES.items():
        total = sums[mode] = _Sums()
        options = {**options, "max_new_tokens": new_tokens}
        for number, (prompt, inputs) in enumerate(zip(prompts, encoded, strict=True), start=1):
            stock = run(model, inputs, options, seed)
            drafted = run(model, inputs, {**options, "assistant": head}, seed)
            verdict = compare(model, inputs, options, seed, stock, drafted)
            stats = drafted.stats or DraftStats()
            ids = drafted.sequences[0, inputs["input_ids"].shape[1] :].tolist()
            show("")
            line = (
                f"{mode}, prompt {number}: stock {stock.seconds:.2f} s, drafted {drafted.seconds:.2f} s, "
                f"τ {stats.tau:.2f}, same text: {verdict}"
            )
            show(pen(_BOLD, fill(line, _WIDTH)))
            owners = zip(ids, origins(len(ids), [row[0] for row in stats.committed]), strict=True)
            text = pen(_DIM, prompt)
            for accepted, group in groupby(owners, key=lambda token: token[1][1]):
                piece = tokenizer.decode([token for token, _ in group], skip_special_tokens=True)
                text += pen(_GREEN, piece) if accepted else piece
            show(text)
            total.stock_seconds += stock.seconds
            total.seconds += drafted.seconds
            total.texts.append(ids)
            total.verdict += verdict
            total.stats.merge(stats)

    show("")
    show(pen(_BOLD, "speed, from the seconds of this one run, prefill included:"))
    for mode, total in sums.items():
        show(
            f"  {mode}: {total.stock_seconds / total.seconds:.2f} x stock (τ {total.stats.tau:.2f}, repeated "
            f"4-grams in the text {repeated_4grams(total.texts):.0%})"
        )
    show("τ: tokens per forward pass of the target; `hf-dart view` draws the tree of every pass")
    verdict = sum((total.verdict for total in sums.values()), Verdict())
    compared = (
        f"compared: {verdict.rows} outputs token for token, {verdict.near_ties} near-ties, "
        f"{verdict.differences} differences; generator left as stock leaves it: "
        f"{'yes' if verdict.generator else 'no'}"
    )
    show(fill(compared, _WIDTH))
    show(pen(_BOLD, f"identical: {verdict}"))
    return verdict.identical


@torch.no_grad()
def fastest_threads(model: PreTrainedModel) -> int:
    """Return the number of CPU threads with which the target alone is fastest, torch's own choice being the most.

    A small model is slowed down by many threads, and by any second one where other programs keep the cores busy.
    """
    most = torch.get_num_threads()
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    fastest, record = most, inf
    try:
        for threads in sorted({1, 2, 4, most} & set(range(most + 1))) if model.device.type == "cpu" else ():
            torch.set_num_threads(threads)
            model(input_ids=token, use_cache=False)
            start = perf_counter()
            for _ in range(_TRIAL_FORWARDS):
                model(input_ids=token, use_cache=False)
                if perf_counter() - start > record:
                    break
            else:
                fastest, record = threads, perf_counter() - start
    finally:
        torch.set_num_threads(most)
    return fastest


def _headline(pair: Pair) -> str:
    sizes = [sum(p.numel() for p in module.parameters()) / 1e6 for module in (pair.model, pair.head)]
    dtype, threads = str(pair.model.dtype).removeprefix("torch."), torch.get_num_threads()
    return (
        f"{pair.target_name} ({sizes[0]:.1f} M parameters) with {pair.head_name} ({sizes[1]:.1f} M), {dtype} "
        f"on {pair.model.device.type}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
