"""The command line `hf-dart`; one module of this package per command, whose `add` adds it to the others."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from hf_dart import __version__
from hf_dart.cli import (
    audit,
    bench,
    convert,
    demo,
    generate,
    ngram,
    profile,
    push,
    regenerate,
    serve,
    train,
    view,
)
from hf_dart.errors import UserError, did_you_mean

# In the order of --help.
_COMMANDS = (demo, generate, view, serve, regenerate, train, bench, profile, audit, push, ngram, convert)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if all was well, 1 if an output was not stock's, 2 for input that cannot be used."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(words)
    arguments.words = words
    try:
        return arguments.command(arguments)
    except UserError as error:
        print(f"hf-dart: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader has left; nothing to say
        return 141


class _Parser(argparse.ArgumentParser):
    """Names the option or word that was most likely meant, as argparse does by itself from Python 3.14 on."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(args or [])
        space, rest = super().parse_known_args(args, namespace)
        unknown = next((word.split("=")[0] for word in rest if word.startswith("--")), None)
        if unknown is not None:
            self.error(self._no_option(unknown))
        return space, rest

    def _no_option(self, unknown: str) -> str:
        remedy = did_you_mean(unknown, self._option_string_actions, otherwise="--help lists all.")
        return f"there is no option {unknown}; {remedy}"

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice is not None:
            before = [one for one, word in itertools.pairwise(self._words) if word == choice[1]]
            unknown = [one for one in before if one.startswith("--") and one not in self._option_string_actions]
            remedy = did_you_mean(choice[1], [word.strip("' ") for word in choice[2].split(",")], otherwise="")
            if unknown:
                message = self._no_option(unknown[0])  # its value was taken for a command
            elif remedy:
                message = f"{message}; {remedy}"
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    made = _Parser(
        prog="hf-dart",
        description="Faster model.generate() with draft heads and token trees, token for token the same.",
    )
    made.add_argument("--version", action="version", version=f"hf-dart {__version__}")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    return made
