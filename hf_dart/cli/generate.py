"""`hf-dart generate` and `hf-dart view`: continue a prompt, streaming, or as a page that shows how it was drafted."""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

from hf_dart.bench.pair import thinking_of
from hf_dart.cli import common
from hf_dart.errors import UserError, as_user_error, check_text


def add(commands: Any) -> None:
    prompt = argparse.ArgumentParser(add_help=False)
    prompt.add_argument("prompt", help="the text to continue")
    prompt.add_argument("--max-new-tokens", type=common.positive, default=256, help="default: %(default)s")
    default = "0 is greedy (default: the target's generation_config)"
    prompt.add_argument("--temperature", type=common.temperature, help=default)
    prompt.add_argument("--seed", type=common.seed, default=0, help="default: %(default)s")
    prompt.add_argument("--chat", action="store_true", help="put the prompt into the chat template")
    thinking = "passed to the chat template (default: as in the conversations that the head was trained on)"
    prompt.add_argument("--thinking", action=argparse.BooleanOptionalAction, help=thinking)

    options = [common.pair_options(), prompt]
    parser = commands.add_parser("generate", parents=options, help="continue a prompt, streaming")
    parser.add_argument("--stock", action="store_true", help="without the head, to compare")
    parser.add_argument("--stats", action="store_true", help="speed and what the drafts did, on standard error")
    parser.set_defaults(command=_generate)

    parser = commands.add_parser("view", parents=options, help="a page that shows every token, tree and phase")
    parser.add_argument("--output", type=Path, default=Path("view.html"), metavar="FILE", help="default: view.html")
    parser.set_defaults(command=_view)


def _generate(arguments: argparse.Namespace) -> int:
    pair, inputs, options = _prepare(arguments)
    import torch
    from transformers import TextStreamer

    if not arguments.stock:
        options["assistant"] = pair.head
    streamer = TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    torch.manual_seed(arguments.seed)
    begun = perf_counter()
    with as_user_error(ValueError):
        ids = pair.model.generate(**inputs, streamer=streamer, **options)
    if arguments.stats:
        tokens = ids.shape[1] - inputs["input_ids"].shape[1]
        rate = f"{tokens / (perf_counter() - begun):.1f} tokens/s"
        if arguments.stock:
            common.say(rate)
        else:
            stats = pair.head.last_stats
            common.say(f"{rate}; {stats.tokens} tokens in {stats.rounds} rounds, tau {stats.tau:.2f}")
            depths = " ".join(map(str, stats.accepted_per_depth))
            common.say(f"{stats.accepted} of {stats.drafted} drafts accepted, by depth: {depths}")
            common.say(f"seconds: {', '.join(f'{phase} {spent:.2f}' for phase, spent in stats.seconds.items())}")
    return 0


def _view(arguments: argparse.Namespace) -> int:
    common.check_file(arguments.output)
    pair, inputs, options = _prepare(arguments)
    from hf_dart.bench.exact import compare, run
    from hf_dart.bench.page import View

    with as_user_error(ValueError):
        stock = run(pair.model, inputs, options, arguments.seed)
        drafted = run(pair.model, inputs, {**options, "assistant": pair.head, "trace": True}, arguments.seed)
    verdict = compare(stock, drafted)
    note = (
        f"{pair.target_name} with {pair.head_name}, {str(pair.model.dtype).removeprefix('torch.')} on "
        f"{pair.model.device.type}. The same text as stock's: {verdict}."
    )
    ids, stats = drafted.sequences[0].tolist(), pair.head.last_stats
    start = inputs["input_ids"].shape[1]
    with common.writing(arguments.output):
        View(pair.tokenizer, ids[:start], ids[start:], stats, notes=(note,)).save(arguments.output)
    print(f"{arguments.output}: τ {stats.tau:.2f}, the same text as stock's: {verdict}")
    return 0 if verdict.identical else 1


def _prepare(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the pair, the encoded prompt, and the options of `generate` that were asked for."""
    if arguments.thinking is not None and not arguments.chat:
        raise UserError("--thinking is for chat templates; add --chat.")
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens}
    if arguments.temperature is not None:
        sampled = {"do_sample": True, "temperature": arguments.temperature}
        options |= sampled if arguments.temperature else {"do_sample": False}
    prompt = check_text(arguments.prompt, "The prompt")
    pair = common.load(arguments)
    options["tokenizer"] = pair.tokenizer  # for stop_strings of the target's generation_config
    if arguments.chat:
        turn, thinking = [{"role": "user", "content": prompt}], arguments.thinking
        flags = thinking_of(pair) if thinking is None else {"enable_thinking": thinking}
        about = "Leave --chat out; the target's chat template does not take this prompt"
        with as_user_error(Exception, about=about):  # a template is a program
            prompt = pair.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, **flags)
    special = not arguments.chat
    encoded = pair.tokenizer(prompt, return_tensors="pt", add_special_tokens=special, return_attention_mask=True)
    if encoded["input_ids"].shape[1] == 0:
        raise UserError("The prompt is empty; give some text.")
    inputs = {name: encoded[name].to(pair.model.device) for name in ("input_ids", "attention_mask")}
    return pair, inputs, options
