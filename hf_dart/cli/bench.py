"""`hf-dart bench`: speed against stock, in one interleaved run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_dart.bench.pair import load_head
from hf_dart.cli.common import (
    check_file,
    command_line,
    given,
    json_option,
    load,
    pair_options,
    positive,
    progress_bar,
    say,
    set_threads,
    show,
    sizes,
    text_option,
    tree_config,
    tree_options,
    write_json,
)
from hf_dart.errors import as_user_error
from hf_dart.hub.loading import DTYPES

_MODES = ("greedy", "penalty", "sampled", "sampled-0.7")
_RIVALS = ("compiled", "lookup", "chain", "tree", "engine", "copies", "packaged")
_SMOKE = {"prompts": 2, "new_tokens": 12, "repeats": 2, "batches": (1, 2)}
_PROMPT_TOKENS, _SMOKE_TOKENS = (96,), (24,)


def add(commands: Any) -> None:
    options = [pair_options(), tree_options()]
    parser = commands.add_parser("bench", parents=options, help="speed against stock, in one interleaved run")
    texts = parser.add_mutually_exclusive_group()
    text_option(texts)
    texts.add_argument(
        "--suite", nargs="+", metavar="SUITE", help="code, chat, math, summarisation, a .jsonl file, or a data set"
    )
    parser.add_argument("--prompts", type=positive, help="of each suite (default: 8)")
    parser.add_argument(
        "--prompt-tokens",
        type=sizes,
        metavar="LENGTHS",
        help="of the longest prompt; files are cut to two thirds of it and more (default: 96; suites: as they are)",
    )
    parser.add_argument("--new-tokens", type=positive, help="per prompt (default: 128)")
    parser.add_argument("--repeats", type=positive, help="default: 5")
    batches = "default: 1,4, as far as --prompts fills them"
    parser.add_argument("--batch", dest="batches", type=sizes, metavar="SIZES", help=batches)
    parser.add_argument("--modes", type=_of(_MODES), metavar="MODES", help=f"of {','.join(_MODES)} (default: all)")
    parser.add_argument(
        "--rivals",
        type=_of(_RIVALS),
        default=("lookup", "tree"),
        metavar="RIVALS",
        help="of compiled,lookup,chain,tree,engine,copies,packaged, or all (default: lookup,tree)",
    )
    parser.add_argument("--assistant-model", metavar="PATH", help="also stock's assisted decoding with this small LM")
    parser.add_argument(
        "--drafter", dest="drafters", action="append", default=[], metavar="PATH", help="also this drafter; repeatable"
    )
    parser.add_argument("--dtypes", type=_of(DTYPES), metavar="DTYPES", help="one after the other, in place of --dtype")
    json_option(parser)
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it works; no figures to quote")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    check_file(arguments.json)
    set_threads(arguments.threads)
    from hf_dart.bench import report, rivals, speed
    from hf_dart.view import tables

    asked = given(arguments, ("prompts", "new_tokens", "repeats", "batches"))
    with as_user_error(ValueError):
        settings = speed.Settings(**{**(_SMOKE if arguments.smoke else {}), **asked})
    modes = dict(zip(_MODES, speed.MODES.items(), strict=True))
    wanted = dict(modes[name] for name in arguments.modes or _MODES)
    found: list[dict[str, Any]] = []
    identical = True
    for dtype in arguments.dtypes or (arguments.dtype,):
        arguments.dtype = dtype
        pair = load(arguments)
        tree = tree_config(arguments, pair.head.tree_config)
        small = None if arguments.assistant_model is None else rivals.load_assistant(arguments.assistant_model, pair)
        drafters = rivals.packaged_drafters(pair) if "packaged" in arguments.rivals else []
        drafters += [load_head(path, pair.model, pair.tokenizer) for path in arguments.drafters]
        methods = rivals.methods(pair, tree, arguments.rivals, small, drafters)
        about = report.circumstances(pair, settings, "", command_line(arguments))
        about |= report.describe_tree(pair, tree, settings.batches)
        for text, prompts in _prompts(arguments, pair.tokenizer, settings.prompts):
            case = {"text": text, "dtype": about["dtype"], "prompt_tokens": max(map(len, prompts))}
            say(", ".join([text, case["dtype"], f"prompts of up to {case['prompt_tokens']} tokens"]))
            with progress_bar() as advance:
                measurements = speed.measure(pair, prompts, settings, methods, advance, wanted)
            found += report.results(measurements, **case)
            identical &= all(one.identical for one in measurements if one.ours)
    about["settings"]["prompt_tokens"] = max(one["prompt_tokens"] for one in found)
    every = {name: ", ".join(dict.fromkeys(one[name] for one in found)) for name in ("text", "dtype")}
    content = {**about, **every, "drafters": rivals.parameters(methods), "results": found}
    show(tables.as_table(content))
    write_json(arguments.json, content)
    return 0 if identical else 1


def _prompts(arguments: argparse.Namespace, tokenizer: Any, count: int) -> Iterator[tuple[str, list[list[int]]]]:
    """What is measured on, one text and length after the other: its name, and the prompts."""
    from hf_dart.bench import suites

    lengths = arguments.prompt_tokens
    if arguments.suite is not None:
        for name in arguments.suite:
            for most in lengths or (None,):
                called = Path(name).name if Path(name).exists() else name
                yield called, suites.open_suite(name, tokenizer, count, most)
        return
    text, files = suites.texts(arguments.text)
    for length in lengths or (_SMOKE_TOKENS if arguments.smoke else _PROMPT_TOKENS):
        yield text, suites.cut_prompts(tokenizer, files, count, length)


def _of(choices: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Names out of `choices` with commas between them, or "all", for argparse."""

    def chosen(text: str) -> tuple[str, ...]:
        names = choices if text == "all" else tuple(text.split(","))
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(choices)}")
        return names

    return chosen
