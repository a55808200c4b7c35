"""`hf-dart generate`: continue a prompt, streaming."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hf_dart.commands.common import (
    load,
    pair_options,
    positive,
    set_threads,
    share,
    temperature,
    tree_config,
    tree_options,
)
from hf_dart.pair import UserError, sentence


def add(commands: Any) -> None:
    options = [pair_options(), tree_options()]
    parser = commands.add_parser("generate", parents=options, help="continue a prompt, streaming")
    parser.add_argument("prompt", help="the text to continue; - reads it from standard input")
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="default: %(default)s")
    parser.add_argument(
        "--temperature", type=temperature, help="0 is greedy (default: the target's generation_config)"
    )
    parser.add_argument("--top-p", type=share, help="sample from the smallest set of this probability")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the chat template")
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="handed to the chat template; default: as in the conversations that the head was trained on",
    )
    parser.add_argument("--stock", action="store_true", help="without the head, to compare")
    parser.add_argument("--stats", action="store_true", help="what the drafts did, on standard error")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    options = _sampling(arguments)
    set_threads(arguments.threads)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    pair = load(arguments)
    import torch
    from transformers import TextStreamer

    model, tokenizer = pair.model, pair.tokenizer
    if arguments.chat:
        prompt = _in_template(prompt, pair, arguments.thinking)
    elif arguments.thinking is not None:
        raise UserError("--thinking is for chat templates; add --chat.")
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=not arguments.chat)
    if encoded["input_ids"].shape[1] == 0:
        raise UserError("The prompt is empty; give some text.")
    drafting = (
        {}
        if arguments.stock
        else {"assistant": pair.head, "tree_config": tree_config(arguments, pair.head.tree_config)}
    )
    torch.manual_seed(arguments.seed)
    try:
        model.generate(
            encoded["input_ids"].to(model.device),
            attention_mask=encoded["attention_mask"].to(model.device),
            max_new_tokens=arguments.max_new_tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **options,
            **drafting,
        )
    except ValueError as error:
        raise UserError(sentence(error)) from error
    if arguments.stats and not arguments.stock:
        print(_stats_line(pair.head.last_stats), file=sys.stderr)
    return 0


def _in_template(prompt: str, pair: Any, thinking: bool | None) -> str:
    """`prompt` as a user's message, up to where the assistant begins to write."""
    from hf_dart.fitted import FittedDrafter

    if not pair.tokenizer.chat_template:
        raise UserError("This target's tokenizer has no chat template; leave --chat out.")
    if thinking is None and isinstance(pair.head, FittedDrafter):
        thinking = pair.head.config.enable_thinking
    turn = [{"role": "user", "content": prompt}]
    flags = {} if thinking is None else {"enable_thinking": thinking}
    return pair.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, **flags)


def _stats_line(stats: Any) -> str:
    seconds = ", ".join(f"{phase} {spent:.2f}" for phase, spent in stats.seconds.items())
    return (
        f"{stats.tokens} tokens in {stats.rounds} rounds, tau {stats.tau:.2f}; {stats.accepted} of "
        f"{stats.drafted} drafts accepted, by depth {stats.accepted_per_depth}; seconds: {seconds}"
    )


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of `generate`: what was not asked for is as the target's own generation_config says."""
    options: dict[str, Any] = {}
    if arguments.temperature == 0:
        if arguments.top_p is not None:
            raise UserError("--top-p chooses among sampled tokens and --temperature 0 samples none; leave one out.")
        options["do_sample"] = False
    elif arguments.temperature is not None or arguments.top_p is not None:
        options["do_sample"] = True
        if arguments.temperature is not None:
            options["temperature"] = arguments.temperature
        if arguments.top_p is not None:
            options["top_p"] = arguments.top_p
    return options
