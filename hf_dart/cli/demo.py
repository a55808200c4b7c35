"""`hf-dart demo`: the packaged pair's text with and without the head, and what the drafts were worth."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from hf_dart.bench.pair import Pair, load_pair
from hf_dart.cli import common

_FILE = Path(__file__).parents[1] / "bench" / "prompts" / "demo.jsonl"
PROMPTS = tuple(json.loads(line)["prompt"] for line in _FILE.read_text(encoding="utf8").splitlines())
"""Beginnings of Python files, written for this demo: in no training corpus."""
_MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled, T=0.8": {"do_sample": True, "temperature": 0.8, "top_k": 0},
}
_GREEN, _DIM, _BOLD, _PLAIN = "\033[32m", "\033[2m", "\033[1m", "\033[0m"
_THREADS = 4  # at most: more slow down a target as small as the packaged one


def add(commands: Any) -> None:
    parser = commands.add_parser("demo", help="a tour on the packaged pair, offline")
    parser.add_argument("--new-tokens", type=common.positive, default=96, help="of each prompt and run (default: 96)")
    learn = "fine-tune the target, and let the head learn from what it drafts"
    parser.add_argument("--learn", action="store_true", help=learn)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    pair = load_pair()
    import torch

    torch.set_num_threads(min(torch.get_num_threads(), _THREADS))
    if arguments.learn:
        from hf_dart.cli import demo_learning

        return 0 if demo_learning.demo(pair) else 1
    return 0 if demo(pair, new_tokens=arguments.new_tokens, color=sys.stdout.isatty()) else 1


def demo(pair: Pair, *, new_tokens: int, color: bool, prompts: tuple[str, ...] = PROMPTS) -> bool:
    """Run the demo and print it; return True if every drafted output was stock's."""
    from hf_dart.bench import report, speed
    from hf_dart.hub.tables import OURS, Verdict, aligned, as_table

    ids = [pair.tokenizer(prompt)["input_ids"] for prompt in prompts]
    settings = speed.Settings(len(ids), max(map(len, ids)), new_tokens, repeats=1, batches=(1,))
    measured = speed.measure(pair, ids, settings, {OURS: {"assistant": pair.head}}, _MODES, quiet=False)

    def pen(code: str, text: str) -> str:
        # A reset at each line's end keeps pagers and copies clean.
        return "\n".join(f"{code}{line}{_PLAIN}" if line and color else line for line in text.split("\n"))

    if color:
        print(f"{pen(_DIM, 'prompt')} · {pen(_GREEN, 'accepted draft tokens')} · the target's own tokens")
    for one in [one for one in measured if one.ours]:
        for number, (prompt, run) in enumerate(zip(prompts, one.runs[0], strict=True), start=1):
            assert run.stats is not None
            print(pen(_BOLD, f"\n{one.mode}, prompt {number}: {run.seconds:.2f} s, τ {run.stats.tau:.2f}"))
            pieces = "".join(pen(_GREEN, text) if drafted else text for text, drafted in _pieces(pair.tokenizer, run))
            print(pen(_DIM, prompt) + pieces)
    about = report.circumstances(pair, settings, "the demo", ["hf-dart", "demo"])
    print("\n" + aligned(as_table({**about, "results": report.results(measured)}, phases=False)))
    print("τ: tokens per forward pass of the target; `hf-dart view` draws the tree of every pass")
    verdict = sum((one.verdict for one in measured), Verdict())
    print(pen(_BOLD, f"identical: {verdict}"))
    return verdict.identical


def _pieces(tokenizer: Any, run: Any) -> list[tuple[str, bool]]:
    """Return the text of a drafted run of one row in pieces, and whether each was drafted."""
    from hf_dart.bench.page import origins

    (tokens,) = run.texts
    owners = origins(len(tokens), [row[0] for row in run.stats.committed])
    runs = groupby(zip(tokens, owners, strict=True), key=lambda token: token[1][1])
    return [
        (tokenizer.decode([token for token, _ in group], skip_special_tokens=True), drafted) for drafted, group in runs
    ]
