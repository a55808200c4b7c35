"""`hf-dart train`: train a draft head."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from hf_dart.cli.common import check_folder, say
from hf_dart.errors import as_user_error


def add(commands: Any) -> None:
    # The options are read by transformers' HfArgumentParser, which has to be imported first: to this parser, no word
    # is an option.
    parser = commands.add_parser("train", help="train a draft head", add_help=False, prefix_chars="\0")
    parser.add_argument("options", nargs="*")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hf_dart.training import recipe
    from hf_dart.training.run import LACKS, run

    with as_user_error(ValueError, OSError, FloatingPointError), as_user_error(ImportError, about=LACKS):
        if {"-h", "--help"} & set(arguments.options):
            recipe.parser(recipe.drafter_of(arguments.options)).print_help()
            return 0
        options = recipe.read_recipe(arguments.options)
        check_folder(Path(options.training.output_dir))
        final, metrics = run(options, say)
    if options.training.should_log:
        tau = f", tau {metrics['eval_tau']:.2f}" if "eval_tau" in metrics else ""
        say(f"The head is in {final}{tau}. Next:")
        head = shlex.quote(str(final))  # whose target is that of its training
        for command in (f'generate --head {head} "Once upon a time"', f"bench --head {head}", f"push {head} USER/NAME"):
            say(f"  hf-dart {command}")
    return 0
