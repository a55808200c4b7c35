"""`hf-dart doctor`: what a set-up lacks, check by check."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hf_dart.cli import common


def add(commands: Any) -> None:
    about = "check versions, hardware, a target and its drafter, each with its remedy; what would gain most here"
    parser = commands.add_parser("doctor", parents=[common.placing_options()], help=about)
    parser.add_argument("target", metavar="MODEL", nargs="?", help="a folder or a Hub id (default: packaged)")
    parser.add_argument("head", metavar="DRAFTER", nargs="?", help="likewise (default: copied text, or packaged)")
    parser.add_argument("--new-tokens", type=common.positive, default=48, help="of each of ten prompts (default: 48)")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON, to paste into an issue")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hf_dart.bench import examining

    common.set_threads(arguments.threads)
    options = {"new_tokens": arguments.new_tokens, **common.loading_options(arguments)}
    report = examining.examine(arguments.target, arguments.head, arguments.dtype, **options)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        common.show(examining.as_page(report))
    return 0 if report["passed"] else 1
