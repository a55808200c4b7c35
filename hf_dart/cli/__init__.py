"""The command line `hf-dart`; one module of this package per command, whose `add` adds it to the others."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from hf_dart import __version__
from hf_dart.errors import UserError

# In the order of --help.
_COMMANDS = (
    "demo", "info", "generate", "serve", "regenerate", "train", "bench", "profile", "audit", "doctor", "push", "ngram",
    "convert",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if all was well, 1 if an output was not stock's, 2 for input that cannot be used."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(words)
    arguments.words = words
    second = vars(arguments).get("second")  # word of bench; argparse drops options of bench before it
    try:
        if second and words[1] != second:
            raise UserError(f"Options before {second} are left out; put them after it.")
        code = arguments.command(arguments)
        sys.stdout.flush()  # short output is written here
        return code
    except UserError as error:
        print(f"hf-dart: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        for broken in (1, 2):  # the reader closed the pipe; what is left is written at the end of the process
            os.dup2(os.open(os.devnull, os.O_WRONLY), broken)
        return 141


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    made = argparse.ArgumentParser(
        prog="hf-dart",
        description="Faster model.generate() with draft heads and token trees, token for token the same.",
    )
    made.add_argument("--version", action="version", version=f"hf-dart {__version__}")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        import_module(f"{__name__}.{command}").add(commands)
    return made
