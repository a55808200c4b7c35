"""`hf-dart drafts`: ways to make a draft tree of one head, side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hf_dart.commands.common import (
    check_folder,
    load,
    pair_options,
    positive,
    set_threads,
    sizes,
    write_json,
)
from hf_dart.pair import UserError, sentence


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "drafts", parents=[pair_options()], help="ways to make a draft tree of one head, side by side"
    )
    parser.add_argument("--nodes", type=positive, default=60, help="of all trees, root included (default: %(default)s)")
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="default: the source of the installed pytest"
    )
    parser.add_argument("--prompts", type=positive, default=8, help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=positive, default=96, help="of the longest (default: %(default)s)")
    parser.add_argument("--new-tokens", type=positive, default=128, help="per prompt (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=1, help="default: %(default)s")
    parser.add_argument(
        "--batch", dest="batches", type=sizes, default=(1,), metavar="SIZES", help="such as 1,4 (default: 1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    check_folder(arguments.json)
    set_threads(arguments.threads)
    from hf_dart.bench import drafts, report, speed, suites

    names = ("prompts", "prompt_tokens", "new_tokens", "repeats", "batches")
    try:
        settings = speed.Settings(**{name: getattr(arguments, name) for name in names})
    except ValueError as error:
        raise UserError(sentence(error)) from error
    files = suites.default_files() if arguments.text is None else arguments.text
    text = "pytest's source" if arguments.text is None else ", ".join(path.name for path in files)
    pair = load(arguments)
    prompts = suites.cut_prompts(pair.tokenizer, files, settings.prompts, settings.prompt_tokens)
    trees = drafts.ways(pair, arguments.nodes)
    measurements = speed.measure(
        pair,
        prompts,
        settings,
        {name: {"assistant": pair.head, "tree_config": tree} for name, tree in trees.items()},
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    about = report.circumstances(pair, settings, pair.head.tree_config, text, ["hf-dart", *arguments.words])
    content = {**report.as_json(measurements, about), "drafts": drafts.describe(pair, trees)}
    print(drafts.as_table(content))
    write_json(arguments.json, content)
    return 0 if all(one.identical for one in measurements if one.ours) else 1
