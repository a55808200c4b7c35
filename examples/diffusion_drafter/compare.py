"""Drafters of one target side by side, and the diffusion drafter over its reverse steps T and draft lengths γ.

    python examples/diffusion_drafter/compare.py runs/diffusion/final --lm runs/lm/final

All in one interleaved run: stock; the language model through stock's `assistant_model=`; the DART head; the diffusion
drafter. Copied text is left out (`lookup=0`), so that each stands for itself. A figure per forward counts the prefill.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_dart import DartHead, DiffusionDrafter, TreeConfig
from hf_dart.bench.exact import run
from hf_dart.bench.speed import MODES, pad_left
from hf_dart.bench.suites import cut_prompts, default_files
from hf_dart.generation.stats import DraftStats
from hf_dart.machine import hardware, versions
from hf_dart.pair import PACKAGED_HEAD, PACKAGED_TARGET


@dataclass
class Method:
    """One way to decode: options of `generate`, what is set before it, and what its calls came to."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[], object] = lambda: None
    seconds: list[float] = field(default_factory=list)  # of each repeat
    tokens: int = 0
    forwards: int = 0  # of the target
    same: int = 0  # calls that gave stock's tokens
    calls: int = 0
    stats: DraftStats = field(default_factory=DraftStats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", help="of train.py")
    parser.add_argument("--lm", help="of train.py --kind lm")
    parser.add_argument("--target", default=str(PACKAGED_TARGET))
    parser.add_argument("--head", default=str(PACKAGED_HEAD))
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8], help="T")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 8], help="of a draft")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=["greedy, penalty 1.1", "sampled, T=1"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32)
    drafter = DiffusionDrafter.from_pretrained(arguments.drafter, target=target, tokenizer=tokenizer)
    head = DartHead.from_pretrained(arguments.head, target=target, tokenizer=tokenizer)
    prompts = cut_prompts(tokenizer, default_files(), arguments.prompts, 96)
    counted: list[int] = []
    target.register_forward_pre_hook(lambda *_: counted.append(1))

    results = []
    print(f"{hardware(target.device)}, {arguments.threads} threads, float32; {versions()}")
    print(f"{drafter.num_parameters():,} parameters in the diffusion drafter, {head.num_parameters():,} in the head")
    for mode in arguments.modes:
        methods = [Method("stock"), *assisted(arguments.lm), *side_by_side(head, drafter)]
        methods += [reverse(drafter, steps, length) for length in arguments.lengths for steps in arguments.steps]
        for method in methods:  # what is only done once
            method.prepare()
            inputs = pad_left(prompts[:1], 0, target.device)
            target.generate(**inputs, **MODES[mode], **method.options, max_new_tokens=8)
        for repeat in range(arguments.repeats):
            for method in methods:
                method.seconds.append(0.0)
            for number, prompt in enumerate(prompts):
                first = (repeat + number) % len(methods)
                texts = {}
                for method in methods[first:] + methods[:first]:
                    texts[method.name] = timed(target, prompt, mode, method, arguments.new_tokens, counted)
                for method in methods:
                    method.same += torch.equal(texts[method.name], texts["stock"])
        results.append({"mode": mode, "methods": [row(method, methods[0]) for method in methods]})
        print(table(mode, results[-1]["methods"]), flush=True)
    if arguments.json is not None:
        about = {"versions": versions(), "hardware": hardware(target.device), "arguments": vars(arguments)}
        arguments.json.write_text(json.dumps({**about, "results": results}, indent=2, default=str) + "\n")


def assisted(path: str | None) -> list[Method]:
    """Stock's speculative decoding: by its own rule for the length of a draft, and with four tokens each."""
    if path is None:
        return []
    methods = []
    for name, rule in (
        ("language model, stock's rule", {}),
        (
            "language model, 4 tokens",
            {
                "num_assistant_tokens": 4,
                "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0.0,
            },
        ),
    ):
        lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        lm.generation_config.update(**rule)
        methods.append(Method(name, {"assistant_model": lm}))
    return methods


def side_by_side(head: DartHead, drafter: DiffusionDrafter) -> list[Method]:
    return [
        Method("DART head, chain of 4", {"assistant": head, "tree_config": TreeConfig.chain(4)}),
        Method("DART head, tree", {"assistant": head, "tree_config": replace(head.tree_config, lookup=0)}),
        reverse(drafter, 1, drafter.draft_length, tree=replace(drafter.tree_config, lookup=0), name="diffusion, tree"),
    ]


def reverse(
    drafter: DiffusionDrafter, steps: int, length: int, tree: TreeConfig | None = None, name: str | None = None
) -> Method:
    """A chain of `length` tokens drafted in `steps` reverse steps, or a tree."""
    options = {"assistant": drafter, "tree_config": tree or TreeConfig.chain(length)}
    return Method(
        name or f"diffusion, {length} tokens, T={steps}", options, lambda: setattr(drafter, "denoise_steps", steps)
    )


def timed(
    target: Any, prompt: list[int], mode: str, method: Method, new_tokens: int, counted: list[int]
) -> torch.Tensor:
    """One call; its text."""
    method.prepare()
    counted.clear()
    inputs = pad_left([prompt], 0, target.device)
    done = run(target, inputs, {**MODES[mode], **method.options, "max_new_tokens": new_tokens})
    method.seconds[-1] += done.seconds
    method.tokens += done.sequences.shape[1] - len(prompt)
    method.forwards += len(counted)
    method.calls += 1
    if done.stats is not None:
        method.stats.merge(done.stats)
    return done.sequences


def row(method: Method, stock: Method) -> dict[str, Any]:
    # All texts of a repeat have stock's number of tokens, but those that stock's loop samples otherwise.
    per_token = [seconds * len(method.seconds) / method.tokens for seconds in method.seconds]
    plain = [seconds * len(stock.seconds) / stock.tokens for seconds in stock.seconds]
    ratios = [theirs / ours for theirs, ours in zip(plain, per_token, strict=True)]
    rounds = method.stats.rounds
    return {
        "method": method.name,
        "tokens per forward": method.tokens / method.forwards,
        "tau": method.stats.tau if rounds else None,
        "draft ms": 1000 * method.stats.seconds["draft"] / rounds if rounds else None,
        "ratio": [median(ratios), min(ratios), max(ratios)],
        "same as stock": method.same / method.calls,
    }


def table(mode: str, rows: list[dict[str, Any]]) -> str:
    columns = ["method", "x stock", "tokens per forward", "τ", "draft ms", "same text"]
    lines = [f"\n{mode}\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for one in rows:
        middle, low, high = one["ratio"]
        figures = "" if one["tau"] is None else f"{one['tau']:.2f} | {one['draft ms']:.2f}"
        lines.append(
            f"| {one['method']} | **{middle:.2f}** [{low:.2f}, {high:.2f}] | {one['tokens per forward']:.2f} | "
            f"{figures or ' | '} | {one['same as stock']:.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
