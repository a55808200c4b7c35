"""Options, checks and loading that several commands share."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from hf_dart.bench.pair import Pair, load_pair, target_of
from hf_dart.errors import LEAST_TEMPERATURE, UserError, as_user_error, sentence
from hf_dart.hub.loading import DTYPES, PACKAGED, load_tokenizer
from hf_dart.hub.tables import aligned


def checked(kind: Callable[[str], Any], holds: Callable[[Any], bool], says: str) -> Callable[[str], Any]:
    """Make a type for argparse: values for which `holds` is true; other text is refused as not being `says`."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if holds(found := kind(text)):
                return found
        raise argparse.ArgumentTypeError(f"{text} is not {says}")

    return read


positive = checked(int, lambda number: number >= 1, "a whole number of 1 or more")
seed = checked(int, lambda number: 0 <= number < 2**32, f"a whole number from 0 to {2**32 - 1}")
temperature = checked(
    float, lambda number: number == 0 or LEAST_TEMPERATURE <= number < inf, f"0, or {LEAST_TEMPERATURE:g} or more"
)
above_zero = checked(float, lambda number: number > 0, "a number above 0")
json_object = checked(
    json.loads, lambda found: isinstance(found, dict), """a JSON object, such as '{"load_in_4bit": true}'"""
)


def sizes(text: str) -> tuple[int, ...]:
    """Parse whole numbers with commas between them, 1k being 1024, for argparse."""
    return tuple(1024 * positive(one[:-1]) if one.endswith("k") else positive(one) for one in text.split(","))


def pair_options() -> argparse.ArgumentParser:
    """Make a parent parser: which target and head, and how they run."""
    pair = argparse.ArgumentParser(add_help=False, parents=[target_options()])
    pair.add_argument("--head", help="a folder, a Hub id, or auto (default: the packaged target's; else copied text)")
    pair.add_argument("--ngram", type=Path, metavar="FILE", help="n-gram table of the target's tokenizer")
    return pair


def target_options() -> argparse.ArgumentParser:
    """Make a parent parser: which target, and how it runs."""
    target = argparse.ArgumentParser(add_help=False, parents=[placing_options()])
    target.add_argument("--target", help=f"a folder, a Hub id, {PACKAGED!r} (default: that of --head)")
    return target


def placing_options() -> argparse.ArgumentParser:
    """Make a parent parser: how a target runs."""
    target = argparse.ArgumentParser(add_help=False)
    target.add_argument("--dtype", choices=DTYPES, help="default: float32 for the packaged pair, else as saved")
    target.add_argument("--device-map", help="as for from_pretrained: auto, cpu, cuda:1, ... (default: a GPU, if any)")
    target.add_argument("--attn-implementation", metavar="NAME", help="attention of the target, as for from_pretrained")
    fields = 'of the target: fields of a quantization config of transformers, such as {"load_in_4bit": true}'
    target.add_argument("--quantization", type=json_object, metavar="JSON", help=fields)
    target.add_argument("--threads", type=positive, help="CPU threads (default: torch's choice)")
    return target


def text_option(parser: argparse._ActionsContainer, about: str = "default: the installed pytest's source") -> None:
    """Add the option for files of plain text, such as `bench.suites.texts` takes."""
    says = "plain text; `bench --suite` and `ngram build --dataset` take rows of a data set"
    plain = checked(Path, lambda file: file.suffix not in (".jsonl", ".parquet"), says)
    parser.add_argument("--text", type=plain, nargs="+", metavar="FILE", help=about)


def json_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for the file of a report, for `check_file` and `write_json`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")


def given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the options among `names` that were given; others have None as their default."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def show(markdown: str) -> None:
    """Print tables: with aligned columns on a terminal, as Markdown elsewhere."""
    print(aligned(markdown) if sys.stdout.isatty() else markdown)


def say(line: str) -> None:
    """Tell on standard error how far a command is."""
    print(line, file=sys.stderr, flush=True)


def load(arguments: argparse.Namespace) -> Pair:
    """Load target, head and n-gram table that the command line names, on so many threads as it says."""
    set_threads(arguments.threads)
    options = loading_options(arguments)
    target = arguments.target or target_of(arguments.head)
    if vars(arguments).get("chat") and not load_tokenizer(target).chat_template:  # before the slow model
        raise UserError("This target's tokenizer has no chat template; leave --chat out.")
    pair = load_pair(target, arguments.head, arguments.dtype, **options)
    if arguments.ngram is not None:
        from hf_dart.trees.ngram.table import NgramTable

        with as_user_error():
            pair.head.ngram = NgramTable.load(arguments.ngram)
    return pair


def loading_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of `from_pretrained` that `placing_options` adds, but for the dtype; the target goes to a GPU if any."""
    import torch

    options = given(arguments, ("device_map", "attn_implementation"))
    if torch.cuda.is_available():
        options.setdefault("device_map", {"": int(os.environ.get("LOCAL_RANK", 0))})
    if arguments.quantization is not None:
        options["quantization_config"] = arguments.quantization
    return options


def set_threads(threads: int | None) -> None:
    """Use so many threads; None leaves it to torch."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system refuses inside into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot write {str(path)!r} ({sentence(error)}); make room there or name another.") from error


def check_file(file: Path | None) -> None:
    """Raise a `UserError` if a file that was named cannot be written: before a long run, not after it."""
    if file is not None:
        with writing(file):
            there = file.exists()
            file.open("a").close()
            if not there:
                file.unlink()


def check_folder(folder: Path) -> None:
    """Raise a `UserError` if a folder cannot be made, or written to where there is one."""
    with writing(folder):
        there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        TemporaryFile(dir=there).close()


def write_json(file: Path | None, content: dict[str, Any]) -> None:
    """Write a report, if a file was named; a full disk leaves the old one, except behind a link."""
    if file is not None:
        with writing(file):
            apart = file.is_file() and not file.is_symlink() and os.access(file.parent, os.W_OK)  # not /dev/stdout
            new = file.with_name(f"{file.name}.new") if apart else file
            new.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf8")
            new.replace(file)
