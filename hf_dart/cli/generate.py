"""`hf-dart generate`: continue a prompt, streaming."""

from __future__ import annotations

import argparse
import textwrap
from time import perf_counter
from typing import Any

from hf_dart.cli.common import load, pair_options, say, set_threads, tree_config, tree_options
from hf_dart.cli.prompting import encode_prompt, prompt_options, read_prompt, sampling
from hf_dart.errors import as_user_error


def add(commands: Any) -> None:
    options = [pair_options(), tree_options(), prompt_options()]
    parser = commands.add_parser("generate", parents=options, help="continue a prompt, streaming")
    parser.add_argument("--stock", action="store_true", help="without the head, to compare")
    parser.add_argument("--stats", action="store_true", help="speed and what the drafts did, on standard error")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    options = sampling(arguments)
    set_threads(arguments.threads)
    prompt = read_prompt(arguments)
    pair = load(arguments)
    import torch
    from transformers import TextStreamer

    model, inputs = pair.model, encode_prompt(arguments, prompt, pair)
    tree = tree_config(arguments, pair.head.tree_config)
    drafting = {} if arguments.stock else {"assistant": pair.head, "tree_config": tree}
    torch.manual_seed(arguments.seed)
    begun = perf_counter()
    with as_user_error(ValueError):
        ids = model.generate(
            **inputs,
            max_new_tokens=arguments.max_new_tokens,
            streamer=TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True),
            **options,
            **drafting,
        )
    if arguments.stats:
        tokens = ids.shape[1] - inputs["input_ids"].shape[1]
        rate = f"{tokens / (perf_counter() - begun):.1f} tokens/s"
        say(rate if arguments.stock else _stats_lines(rate, pair.head.last_stats))
    return 0


def _stats_lines(rate: str, stats: Any) -> str:
    lines = [
        f"{rate}; {stats.tokens} tokens in {stats.rounds} rounds, tau {stats.tau:.2f}; {stats.accepted} of "
        f"{stats.drafted} drafts accepted",
        f"accepted by depth: {' '.join(map(str, stats.accepted_per_depth))}",
        f"seconds: {', '.join(f'{phase} {spent:.2f}' for phase, spent in stats.seconds.items())}",
    ]
    return "\n".join(textwrap.fill(line, 80, subsequent_indent="  ") for line in lines)
