"""`hf-dart bench`: speed against stock, in one interleaved run; `hf-dart bench train`: of training."""

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
    tree_config,
    tree_options,
    write_json,
)
from hf_dart.pair import UserError, sentence

_SMOKE = {"prompts": 2, "prompt_tokens": 24, "new_tokens": 12, "repeats": 2, "batches": (1, 2)}


def add(commands: Any) -> None:
    options = [pair_options(), tree_options()]
    parser = commands.add_parser("bench", parents=options, help="speed against stock, in one interleaved run")
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="default: the source of the installed pytest"
    )
    parser.add_argument("--prompts", type=positive, help="default: 8")
    parser.add_argument(
        "--prompt-tokens",
        type=positive,
        help="of the longest prompt; the shortest has two thirds (default: 96)",
    )
    parser.add_argument("--new-tokens", type=positive, help="per prompt (default: 128)")
    parser.add_argument("--repeats", type=positive, help="default: 5")
    parser.add_argument("--batch", dest="batches", type=sizes, metavar="SIZES", help="such as 1,4, the default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it works; no figures to quote")
    parser.set_defaults(command=_run)
    _add_train(parser.add_subparsers(required=False, metavar="train"))


def _add_train(commands: Any) -> None:
    parser = commands.add_parser(
        "train", parents=[pair_options()], help="training steps against the bare target, and their memory"
    )
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="default: the source of the installed pytest"
    )
    parser.add_argument("--rows", type=positive, help="of the batch (default: 8)")
    parser.add_argument("--length", type=positive, help="tokens of a row (default: 257)")
    parser.add_argument("--blocks", type=sizes, metavar="COUNTS", help="per row (default: 8,16,32,64)")
    parser.add_argument("--loss", help="dart, left_to_right, dpace or lk (default: dart)")
    parser.add_argument("--loss-chunk", type=int, help="blocks whose logits are held at a time; 0: all")
    parser.add_argument("--bf16", action="store_true", default=None, help="bfloat16 autocast")
    parser.add_argument("--repeats", type=positive, help="default: 5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.set_defaults(command=_run_train)


def _run_train(arguments: argparse.Namespace) -> int:
    check_folder(arguments.json)
    set_threads(arguments.threads)
    from hf_dart.bench import suites, train

    names = ("rows", "length", "blocks", "loss", "loss_chunk", "bf16", "repeats")
    given = {name: getattr(arguments, name) for name in names}
    settings = train.Settings(**{name: value for name, value in given.items() if value is not None})
    files = suites.default_files() if arguments.text is None else arguments.text
    text = "pytest's source" if arguments.text is None else ", ".join(path.name for path in files)
    pair = load(arguments)
    rows = train.cut_rows(pair.tokenizer, files, settings.rows, settings.length)
    try:
        measurements = train.measure(pair, rows, settings, lambda line: print(line, file=sys.stderr, flush=True))
    except ValueError as error:
        raise UserError(sentence(error)) from error
    content = train.as_json(measurements, pair, settings, text, ["hf-dart", *arguments.words])
    print(train.as_table(content))
    write_json(arguments.json, content)
    return 0


def _run(arguments: argparse.Namespace) -> int:
    check_folder(arguments.json)
    set_threads(arguments.threads)
    from hf_dart.bench import report, speed, suites

    given = {
        name: getattr(arguments, name) for name in ("prompts", "prompt_tokens", "new_tokens", "repeats", "batches")
    }
    smoke = _SMOKE if arguments.smoke else {}
    try:
        settings = speed.Settings(**{**smoke, **{name: value for name, value in given.items() if value is not None}})
    except ValueError as error:
        raise UserError(sentence(error)) from error
    files = suites.default_files() if arguments.text is None else arguments.text
    text = "pytest's source" if arguments.text is None else ", ".join(path.name for path in files)
    pair = load(arguments)
    prompts = suites.cut_prompts(pair.tokenizer, files, settings.prompts, settings.prompt_tokens)
    tree = tree_config(arguments, pair.head.tree_config)
    measurements = speed.measure(pair, prompts, settings, tree, lambda line: print(line, file=sys.stderr, flush=True))
    about = report.circumstances(pair, settings, tree, text, ["hf-dart", *arguments.words])
    content = report.as_json(measurements, about)
    print(report.as_table(content))
    write_json(arguments.json, content)
    return 0 if all(one.verdict.identical for one in measurements if one.method == speed.OURS) else 1
