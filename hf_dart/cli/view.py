"""`hf-dart view`: continue a prompt and write a page that shows every token, tree and phase."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_dart.cli.common import check_file, load, pair_options, set_threads, tree_config, tree_options, writing
from hf_dart.cli.prompting import encode_prompt, prompt_options, read_prompt, sampling
from hf_dart.errors import as_user_error


def add(commands: Any) -> None:
    options = [pair_options(), tree_options(), prompt_options()]
    parser = commands.add_parser("view", parents=options, help="a page that shows every token, tree and phase")
    parser.add_argument(
        "--output", type=Path, default=Path("view.html"), metavar="FILE", help="the page (default: %(default)s)"
    )
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    options = {**sampling(arguments), "max_new_tokens": arguments.max_new_tokens}
    set_threads(arguments.threads)
    check_file(arguments.output, "page")
    prompt = read_prompt(arguments)
    pair = load(arguments)
    from hf_dart.bench.exact import compare, run
    from hf_dart.view import View

    inputs = encode_prompt(arguments, prompt, pair)
    drafting = {"assistant": pair.head, "tree_config": tree_config(arguments, pair.head.tree_config)}
    with as_user_error(ValueError):
        stock = run(pair.model, inputs, options, arguments.seed)
        drafted = run(pair.model, inputs, {**options, **drafting, "trace": True}, arguments.seed)
    verdict = compare(pair.model, inputs, options, arguments.seed, stock, drafted)
    note = (
        f"{pair.target_name} with {pair.head_name}, {str(pair.model.dtype).removeprefix('torch.')} on "
        f"{pair.model.device.type}. The same text as stock's: {verdict}."
    )
    ids, stats = drafted.sequences[0].tolist(), pair.head.last_stats
    start = inputs["input_ids"].shape[1]
    with writing(arguments.output):
        View(pair.tokenizer, ids[:start], ids[start:], stats, notes=(note,)).save(arguments.output)
    print(f"{arguments.output}: τ {stats.tau:.2f}, the same text as stock's: {verdict}")
    return 0 if verdict.identical else 1
