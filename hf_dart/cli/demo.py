"""`hf-dart demo`: a tour on the packaged pair."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hf_dart.cli import common


def add(commands: Any) -> None:
    parser = commands.add_parser("demo", parents=[common.pair_options()], help="a tour on the packaged pair, offline")
    parser.add_argument(
        "--new-tokens", type=common.positive, default=96, help="new tokens per prompt and run (default: %(default)s)"
    )
    parser.add_argument("--seed", type=common.seed, default=0, help="seed of the sampled runs")
    parser.add_argument("--color", action="store_true", help="use colours even if the output is not a terminal")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    pair = common.load(arguments, trained=True)
    from hf_dart.bench.tour import demo, fastest_threads

    common.set_threads(arguments.threads or fastest_threads(pair.model))
    color = arguments.color or sys.stdout.isatty()
    same = demo(pair, new_tokens=arguments.new_tokens, seed=arguments.seed, color=color)
    return 0 if same else 1
