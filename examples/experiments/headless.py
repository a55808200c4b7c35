"""What speeds a model up for which no drafter was trained: copies, a memory, a head that learns; beside a trained head.

    python examples/experiments/headless.py --json model_cards/learning/headless.json
    python examples/experiments/headless.py --target examples/deep_pair/model --head examples/deep_pair/head

A packaged target answers the same calls, one after the other, with each way to draft, and by stock `generate`, for each
kind of text. Ratios are of processor time, what is learnt between calls included; texts are compared. Sampled at
T = 0.7, on one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from learning import PROMPT, python_tokens

from hf_dart import DartHead, Learner, LookupDrafter, SuffixStore, attach, detach
from hf_dart.bench.pair import Pair, load_pair
from hf_dart.cli.demo_learning import header_tokens
from hf_dart.decoding.stats import DraftStats
from hf_dart.hub.machine import circumstances

KINDS = ("Python", "C++ headers", "Python, each prompt four times")
TABLE = "| text | drafted by | x stock | τ | τ of the last quarter |\n|---|---|---|---|---|"


def prompts_of(kind: str, tokenizer: Any, calls: int) -> list[list[int]]:
    """Prompts of one kind, one for each call."""
    rows = (header_tokens if kind == "C++ headers" else python_tokens)(tokenizer)
    random.Random(1).shuffle(rows)
    again = 4 if "four times" in kind else 1
    return [rows[number // again][:PROMPT] for number in range(calls)]


def ways(pair: Pair) -> dict[str, dict[str, Any]]:
    """Arguments of `attach` by the name of a way; all that is learnt or remembered begins empty."""
    untrained = DartHead.from_target(
        pair.model, tokenizer=pair.tokenizer, feature_layers=pair.head.feature_layers, num_layers=1
    )
    return {
        "copies (`LookupDrafter`)": {"drafter": LookupDrafter()},
        "copies, a memory": {"drafter": LookupDrafter(), "memory": SuffixStore()},
        "an untrained head that learns": {"drafter": untrained.eval(), "learner": Learner()},
        "a trained head": {"drafter": pair.head},
        "a trained head, a memory": {"drafter": pair.head, "memory": SuffixStore()},
    }


def answered(pair: Pair, prompts: list[list[int]], new: int, given: dict[str, Any]) -> dict[str, Any]:
    """Answer all prompts in turn: the texts, the seconds that it took, and statistics of each call."""
    texts, stats = [], list[DraftStats]()
    if given:
        attach(pair.model, **given)
    began = time.process_time()
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        torch.manual_seed(number)
        options = {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": new}
        texts.append(pair.model.generate(ids, attention_mask=torch.ones_like(ids), **options))
        if given:
            stats.append(given["drafter"].last_stats)
    seconds = time.process_time() - began
    detach(pair.model)
    return {"texts": texts, "seconds": seconds, "stats": stats}


def tau(stats: list[DraftStats]) -> float:
    """Acceptance length of several calls."""
    return sum(one.tokens for one in stats) / sum(one.row_rounds for one in stats)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder of a target (default: the packaged pair's)")
    parser.add_argument("--head", help="folder of its head (default: the packaged pair's)")
    parser.add_argument("--calls", type=int, default=48, help="of each kind of text (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="of a call (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    rows = []
    print(TABLE)
    for kind in KINDS:
        pair = load_pair(given.target, given.head, dtype="float32")
        prompts = prompts_of(kind, pair.tokenizer, given.calls)
        answered(pair, prompts[:1], given.new_tokens, {})  # warms up
        stock = answered(pair, prompts, given.new_tokens, {})
        for name, way in ways(pair).items():
            answered(pair, prompts[:1], given.new_tokens, {"drafter": way["drafter"]})
            found = answered(pair, prompts, given.new_tokens, way)
            if not all(map(torch.equal, found["texts"], stock["texts"])):
                raise SystemExit("The texts differ.")
            last = found["stats"][-max(len(prompts) // 4, 1) :]
            ratio = stock["seconds"] / found["seconds"]
            rows.append(f"| {kind} | {name} | {ratio:.2f} | {tau(found['stats']):.2f} | {tau(last):.2f} |")
            print(rows[-1], flush=True)
    if given.json is not None:
        about = circumstances(["python", *sys.argv], pair.model.device)
        given.json.write_text(json.dumps({**about, "markdown": "\n".join([TABLE, *rows])}, indent=1) + "\n")


if __name__ == "__main__":
    main()
