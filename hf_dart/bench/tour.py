"""`hf-dart demo`: the same text with and without the head, and what the drafts were worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from textwrap import fill
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.bench.exact import compare, repeated_4grams, run
from hf_dart.bench.pair import Pair
from hf_dart.decoding.stats import DraftStats
from hf_dart.view.page import origins
from hf_dart.view.tables import Verdict
from hf_dart.view.terminal import (
    BOLD,
    DIM,
    GREEN,
    Pen,
    bars,
    colored_text,
    tree_lines,
)

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
_WIDTH = 79  # columns of what the demo says; the model's text runs as it will
_WARMUP_TOKENS = 12
_TRIAL_FORWARDS = 20


@dataclass
class _Sums:
    """What the runs of one mode add up to."""

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
    pen = Pen(color)
    model, head, tokenizer = pair.model, pair.head, pair.tokenizer
    show(fill(_headline(pair), _WIDTH))
    if color:
        show(f"{pen(DIM, 'prompt')} · {pen(GREEN, 'accepted draft tokens')} · the target's own tokens")
    else:
        show("(in a terminal, or with --color, accepted draft tokens are green)")

    encoded = [_encode(tokenizer, prompt, model.device) for prompt in prompts]
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
            show(pen(BOLD, fill(line, _WIDTH)))
            drafts = [one for _, one in origins(len(ids), [row[0] for row in stats.committed])]
            show(colored_text(pen, tokenizer, prompt, ids, drafts))
            total.stock_seconds += stock.seconds
            total.seconds += drafted.seconds
            total.texts.append(ids)
            total.verdict += verdict
            total.stats.merge(stats)

    show("")
    for line in _one_tree(pen, pair, encoded[0], new_tokens):
        show(line)
    show("")
    for line in _summary(pen, sums):
        show(line)
    verdict = sum((total.verdict for total in sums.values()), Verdict())
    compared = (
        f"compared: {verdict.rows} outputs token for token, {verdict.near_ties} near-ties, "
        f"{verdict.differences} differences; generator left as stock leaves it: "
        f"{'yes' if verdict.generator else 'no'}"
    )
    show(fill(compared, _WIDTH))
    show(pen(BOLD, f"identical: {verdict}"))
    return verdict.identical


@torch.no_grad()
def fastest_threads(model: PreTrainedModel) -> int:
    """The number of CPU threads with which the target alone is fastest, torch's own choice being the most.

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


def _encode(tokenizer: Any, prompt: str, device: torch.device) -> dict[str, Tensor]:
    encoded = tokenizer(prompt, return_tensors="pt")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _one_tree(pen: Pen, pair: Pair, inputs: dict[str, Tensor], new_tokens: int) -> list[str]:
    """Draw the tree of one typical round of a prompt, and the way the target took through it."""
    # Without copies of earlier text: those depend on the whole call, this tree on the head alone.
    config = replace(pair.head.tree_config, nodes=16, lookup=0)
    options = {**MODES["greedy"], "max_new_tokens": new_tokens, "assistant": pair.head, "tree_config": config}
    done = run(pair.model, inputs, {**options, "trace": True})
    stats = done.stats
    if stats is None or stats.trace is None or not stats.rounds:
        return []
    committed = [len(one.paths[0]) for one in stats.trace.rounds]
    typical = min(range(len(committed)), key=lambda i: (abs(committed[i] - stats.tau - 0.5), i))
    text = done.sequences[0].tolist()
    written = inputs["input_ids"].shape[1] + 1 + sum(committed[:typical])
    accepted = committed[typical] - 1
    before = pair.tokenizer.decode(text[:written]).rsplit("\n", 1)[-1]
    bonus = repr(pair.tokenizer.decode(text[written + accepted : written + accepted + 1]))
    tree = stats.trace.rounds[typical]
    nodes = 1 + sum(parent >= 0 for parent in tree.parents[0])
    return [
        pen(BOLD, f"one tree: round {typical + 1} of {len(committed)}, {nodes} nodes, after {before!r}"),
        *tree_lines(pen, pair.tokenizer, tree),
        f"the target accepts {accepted} ({pen(GREEN, '●')}) and adds {bonus}: {accepted + 1} tokens in one pass",
    ]


def _summary(pen: Pen, sums: dict[str, _Sums]) -> list[str]:
    stats = DraftStats()
    for total in sums.values():
        stats.merge(total.stats)
    rounds = max(stats.row_rounds, 1)
    return [
        pen(BOLD, f"rounds whose draft was accepted to depth 1, 2, ... (of {stats.row_rounds} in all runs)"),
        *bars([count / rounds for count in stats.accepted_per_depth]),
        f"τ = {stats.tau:.2f} tokens per forward pass of the target",
        pen(BOLD, "speed, from the seconds of this one run, prefill included:"),
        *(
            f"  {mode}: {total.stock_seconds / total.seconds:.2f} x stock (τ {total.stats.tau:.2f}, repeated "
            f"4-grams in the text {repeated_4grams(total.texts):.0%})"
            for mode, total in sums.items()
        ),
    ]
