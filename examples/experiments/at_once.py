"""Requests at once beside calls in a row: what a batch of seats brings on a CPU, for a pair and its prompts.

    python examples/experiments/at_once.py --requests 8 --new-tokens 128
    python examples/experiments/at_once.py --target examples/deep_pair/model --head examples/deep_pair/head --sampled

Times are what one thread computed for (`time.process_time`), which other processes on the machine change little. All
ways take turns, and their texts are compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hf_dart import Batcher
from hf_dart.bench.suites import PACKAGED, open_suite
from hf_dart.cli.common import load, pair_options, positive, say, set_threads, show
from hf_dart.decoding.stats import DraftStats
from hf_dart.hub.tables import markdown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[pair_options()]
    )
    parser.add_argument("--requests", type=positive, default=8)
    parser.add_argument("--new-tokens", type=positive, default=128)
    parser.add_argument("--sampled", action="store_true", help="at temperature 1; default: greedy")
    parser.add_argument("--repeats", type=positive, default=3)
    arguments = parser.parse_args()
    set_threads(1)
    pair = load(arguments)
    model, requests = pair.model, arguments.requests
    suites = [open_suite(name, pair.tokenizer, -(-requests // len(PACKAGED)), 300) for name in PACKAGED]
    categories = [prompts for suite in suites for prompts in suite.values()]
    prompts = [ids for row in zip(*categories, strict=True) for ids in row][:requests]
    options = {"max_new_tokens": arguments.new_tokens, "eos_token_id": None, "do_sample": arguments.sampled}
    options |= {"temperature": 1.0, "top_k": 0} if arguments.sampled else {}

    def in_a_row(**more: Any) -> tuple[list[Tensor], list[DraftStats]]:
        texts, stats = [], []
        for seed, ids in enumerate(prompts):
            torch.manual_seed(seed)
            texts.append(model.generate(torch.tensor([ids]), **options, **more))
            stats += [pair.head.last_stats] if more["assistant"] is not None else []
        return texts, stats

    def at_once(drafter: Any, seats: int = requests) -> tuple[list[Tensor], list[DraftStats]]:
        with Batcher(model, drafter, seats=seats) as batcher:
            handles = [batcher.submit(ids, seed=seed, **options) for seed, ids in enumerate(prompts)]
        return [one.result() for one in handles], [one.stats for one in handles if one.stats]

    ways: dict[str, Callable[[], Any]] = {
        "stock, in a row": lambda: in_a_row(assistant=None),
        "drafted, in a row": lambda: in_a_row(assistant=pair.head),
        "one seat": lambda: at_once(pair.head, 1),
        "at once": lambda: at_once(pair.head),
        "at once, no drafts": lambda: at_once(None),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    wanted, rows = ways["stock, in a row"]()[0], []
    for repeat in range(arguments.repeats + 1):
        rows = []
        for name, run in ways.items():
            began = time.process_time()
            texts, stats = run()
            if repeat:  # the first one warms up
                seconds[name].append(time.process_time() - began)
            same = sum(map(torch.equal, texts, wanted))
            taken, rounds = sum(one.tokens for one in stats), sum(one.row_rounds for one in stats)
            nodes = sum(one.drafted for one in stats) / max(rounds, 1)
            paused = sum(one.paused_rounds for one in stats) / max(rounds, 1)
            figures = [f"{taken / max(rounds, 1):.2f}", f"{nodes:.1f}", f"{paused:.0%}", f"{same}/{requests}"]
            rows.append([name, "", *figures])
        say(f"repeat {repeat} of {arguments.repeats}")
    tokens, base = requests * arguments.new_tokens, median(seconds["stock, in a row"])
    for row in rows:
        spent = median(seconds[row[0]])
        row[1:2] = [f"{tokens / spent:.0f}", f"{base / spent:.2f}"]
    show("\n".join(markdown(["", "tokens/CPU s", "x stock", "τ", "nodes", "paused", "same"], rows)))


if __name__ == "__main__":
    main()
