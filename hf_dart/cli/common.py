"""What several commands share: options, their checks, loading."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hf_dart.bench.pair import Pair, load_pair, target_of
from hf_dart.errors import LEAST_TEMPERATURE, UserError, as_user_error, sentence
from hf_dart.hub.loading import DTYPES, PACKAGED, load_tokenizer, quantization_config
from hf_dart.view.tables import aligned


def pair_options() -> argparse.ArgumentParser:
    """A parent parser: which target and head, and how they run."""
    pair = argparse.ArgumentParser(add_help=False, parents=[target_options()])
    pair.add_argument(
        "--head", help="a folder or a Hub id (default: the packaged target's, and copied text for others)"
    )
    pair.add_argument("--ngram", type=Path, metavar="FILE", help="n-gram table of the target's tokenizer")
    return pair


def target_options() -> argparse.ArgumentParser:
    """A parent parser: which target, and how it runs."""
    target = argparse.ArgumentParser(add_help=False)
    target.add_argument("--target", help=f"a folder, a Hub id, {PACKAGED!r} (default: that of --head)")
    target.add_argument("--dtype", choices=DTYPES, help="default: float32 for the packaged pair, else as saved")
    target.add_argument("--device-map", help="as for from_pretrained: auto, cpu, cuda, cuda:1, ...")
    target.add_argument("--attn-implementation", metavar="NAME", help="of the target, as for from_pretrained")
    target.add_argument(
        "--quantization",
        type=fields,
        metavar="JSON",
        help='of the target: fields of a quantization config of transformers, such as {"load_in_4bit": true}',
    )
    target.add_argument("--threads", type=positive, help="CPU threads (default: torch's choice; of demo: the fastest)")
    return target


def tree_options() -> argparse.ArgumentParser:
    """A parent parser: the draft tree."""
    tree = argparse.ArgumentParser(add_help=False)
    tree.add_argument(
        "--nodes", type=positive, help="size of the draft tree, root included (default: by batch and device)"
    )
    tree.add_argument("--depth", type=positive, help="deepest draft (default: the head's draft length)")
    return tree


def text_option(parser: argparse._ActionsContainer) -> None:
    """The files that prompts or rows are cut from, for `bench.suites.texts`."""
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="default: the source of the installed pytest"
    )


def json_option(parser: argparse.ArgumentParser) -> None:
    """The file that a report is written to, for `check_file` and `write_json`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")


def given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those of the options that were given, which have None as their default."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def command_line(arguments: argparse.Namespace) -> list[str]:
    """The words that were typed, for reports."""
    return ["hf-dart", *arguments.words]


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """Show on standard error how far a command is and, where that is a terminal, how long it will still take.

    Yields:
        What takes how many calls are done, and how many there are.
    """
    with tqdm(disable=None, unit="call", dynamic_ncols=True, leave=False) as bar:

        def advance(done: int, calls: int) -> None:
            bar.total = calls
            bar.update(done - bar.n)
            if bar.disable and 10 * done // calls > 10 * (done - 1) // calls:
                say(f"{done} of {calls} calls")

        yield advance


def show(markdown: str) -> None:
    """Print tables: with aligned columns on a terminal, as Markdown elsewhere."""
    print(aligned(markdown) if sys.stdout.isatty() else markdown)


def say(line: str) -> None:
    """Tell on standard error how far a command is."""
    print(line, file=sys.stderr, flush=True)


def load(arguments: argparse.Namespace, trained: bool = False) -> Pair:
    """Target, head and n-gram table that the command line names; a `UserError` if one cannot be loaded.

    Args:
        trained: the command is about the weights of a head.
    """
    if trained and arguments.head is None and arguments.target not in (None, PACKAGED):
        raise UserError(f"This command needs a head that was trained for {arguments.target!r}; name it with --head.")
    options = loading_options(arguments)
    target = target_of(arguments.head) if arguments.target is None and arguments.head else arguments.target
    if vars(arguments).get("chat") and not load_tokenizer(target).chat_template:  # before the model, which takes longer
        raise UserError("This target's tokenizer has no chat template; leave --chat out.")
    pair = load_pair(target, arguments.head, arguments.dtype, arguments.device_map, **options)
    if arguments.ngram is not None:
        from hf_dart.trees.ngram import NgramTable

        with as_user_error():
            pair.head.ngram = NgramTable.load(arguments.ngram)
    return pair


def loading_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `target_options` adds to `from_pretrained` of the target, dtype and places aside."""
    options = given(arguments, ("attn_implementation",))
    if arguments.quantization is not None:
        options["quantization_config"] = quantization_config(arguments.quantization)
    return options


def tree_config(arguments: argparse.Namespace, default: Any) -> Any:
    """The head's own tree, with what the command line asks for."""
    with as_user_error():
        return replace(default, **given(arguments, ("nodes", "depth")))


def set_threads(threads: int | None) -> None:
    """Use so many threads; None leaves it to torch."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def check_file(file: Path | None, what: str = "JSON") -> None:
    """Can it be written, if one was named? asked before a long run, not after it.

    Raises:
        UserError: it cannot.
    """
    if file is None:
        return
    with writing(file):  # asking alone is refused for some names, and in folders of others
        if not file.parent.is_dir():
            raise UserError(f"There is no folder {str(file.parent)!r} to write the {what} to.")
        if file.is_dir():
            raise UserError(f"{str(file)!r} is a folder; give a file to write the {what} to.")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise UserError(f"{str(file)!r} may not be written; give another file for the {what}.")


def check_folder(folder: Path | None) -> None:
    """Can it be written to, or made, if it was named? Errors as for `check_file`."""
    if folder is None:
        return
    with writing(folder):
        there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        if not there.is_dir():
            raise UserError(f"{str(there)!r} is a file; give a folder, or a name that is free.")
        if not os.access(there, os.W_OK):
            raise UserError(f"{str(folder)!r} may not be written; give another folder.")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses inside becomes a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot write {str(path)!r} ({sentence(error)}); make room there or name another.") from error


def write_json(file: Path | None, content: dict[str, Any]) -> None:
    """Write a report, if a file was named."""
    if file is not None:
        with writing(file):
            file.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf8")


def positive(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def fields(text: str) -> dict[str, Any]:
    """A JSON object, for argparse."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def temperature(text: str) -> float:
    """A number of 0, or of `LEAST_TEMPERATURE` or more, for argparse."""
    number = float(text)
    if number and not LEAST_TEMPERATURE <= number < inf:
        raise argparse.ArgumentTypeError(f"{text} is neither 0 nor {LEAST_TEMPERATURE:g} or more")
    return number


def seed(text: str) -> int:
    """A whole number that random generators of all libraries take, for argparse."""
    number = int(text)
    if not 0 <= number < 2**32:
        raise argparse.ArgumentTypeError(f"{text} does not lie in 0..{2**32 - 1}")
    return number


def share(text: str) -> float:
    """A number above 0 and up to 1, for argparse."""
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} does not lie above 0 and up to 1")
    return number


def sizes(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them, for argparse."""
    try:
        return tuple(positive(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes such as 1,4") from error
