"""Errors for users, each one sentence that names the remedy; and checks of fields of a config."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any

INSTALLED_FROM = "./hf-dart"  # argument of `pip install`: a clone of hf-dart, as long as it is not on PyPI
LEAST_TEMPERATURE = 1e-6  # least temperature of sampling: logits divided by much less would overflow


class UserError(Exception):
    """Error that the caller of a command can fix; the message is one sentence."""


def sentence(error: BaseException) -> str:
    """Return the first sentence of an error's message, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[a-z)'\"])\. (?=[A-Z])", text, maxsplit=1)[0][:500]


@contextmanager
def as_user_error(*kinds: type[Exception], about: str = "") -> Iterator[None]:
    """Turn errors of these kinds that are raised inside into a `UserError` of one sentence, after what it is about.

    Without any they are `ValueError` and `OSError`, which this package raises for input.
    """
    caught = kinds or (ValueError, OSError)
    try:
        yield
    except caught as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise UserError("The disk is full; make room there, or write to another one.") from error
        raise UserError(f"{about}: {sentence(error)}" if about else sentence(error)) from error


def check_fields(
    config: Any,
    *,
    least: Mapping[str, int] | None = None,  # the smallest number that each field may be
    choices: Mapping[str, Sequence[str]] | None = None,  # the words that each may be
    shares: Sequence[str] = (),  # fields that go from 0 to 1
) -> None:
    """Raise a `ValueError` that names the first field out of range; None is in every range."""
    for name, smallest in (least or {}).items():
        value = getattr(config, name)
        if value is not None and value < smallest:
            raise ValueError(f"{name} is {value}; give {smallest} or more.")
    for name, words in (choices or {}).items():
        value = getattr(config, name)
        if value is not None and value not in words:
            raise ValueError(f"{name} is {value!r}; give one of {', '.join(words)}.")
    for name in shares:
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; give a number from 0 to 1.")


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a remedy for an unknown name: the known one that looks most like it, or `otherwise` if none does."""
    nearest = get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"did you mean {nearest[0]!r}?" if nearest else otherwise


def refuse_unknown(given: Iterable[str], known: Iterable[str], what: str, kind: type[Exception] = TypeError) -> None:
    """Raise an error of this `kind` for the first name that is not known; `what` begins its message ("X has no")."""
    known = set(known)
    for name in given:
        if name not in known:
            raise kind(f"{what} {name!r:.100}; {did_you_mean(name, known, otherwise='leave it out.')}")


def annotated(kind: type) -> set[str]:
    """Names of the fields that a class and its bases declare."""
    return {name for one in kind.__mro__ for name in vars(one).get("__annotations__", ())}


def head_inside(path: str | Path) -> str:
    """Return a remedy if the head lies in a folder's `final`, where `hf-dart train` writes it; else ""."""
    final = Path(path, "final")
    return f"did you mean {str(final)!r}, the head that was trained there?" if (final / "config.json").is_file() else ""


def missing_folder(path: str | Path) -> bool:
    """Return True for the path of a folder, which can be no id of the Hub, where there is no such folder."""
    name = str(path)
    local = name.startswith((".", "~", "\\")) or Path(path).is_absolute() or name.count("/") > 1
    return local and not Path(path).is_dir()


def read_text(file: str | Path, what: str = "") -> str:
    """Read the UTF-8 text of a file that a user named; `what` it is begins the message of a `UserError`."""
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read {what}{str(file)!r} ({sentence(error)}); give a file of UTF-8 text.") from error


def check_text(text: str, what: str) -> str:
    """Return the text if it can be tokenized, or raise a `UserError`: command lines may bring half a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} holds bytes that are no UTF-8 text ({error.reason}); fix it.") from error
    return text


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) < 2**31


def _number(value: Any) -> bool:
    known = isinstance(value, Real) and not isinstance(value, bool)
    return known and -1e308 < value < 1e308  # a whole number may be too large for a float


def _list_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(map(kind, value))


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_whole, "a whole number below 2^31"),
    "float": (_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "text"),
    "list[int] | tuple[int, ...]": (_list_of(_whole), "a list of whole numbers"),
    "list[float] | tuple[float, ...]": (_list_of(_number), "a list of numbers"),
    "dict[str, Any]": (lambda value: isinstance(value, dict) and all(isinstance(name, str) for name in value),
                       "named fields"),
}  # fmt: skip
"""Check of a value and name of the type, by annotation."""


def check_types(config: Any, kind: type, prefix: str = "") -> None:
    """Raise a `ValueError` that names the first field which holds something else than its annotation says.

    `kind` is the class of the config, or the base class of it whose own fields are looked at.
    """
    for name, annotation in kind.__annotations__.items():
        wanted = annotation.removesuffix(" | None")
        if wanted not in _KINDS:  # such as `TreeConfig.verify_costs`, which has its own check
            continue
        value = getattr(config, name)
        if value is None and wanted != annotation:
            continue
        fits, called = _KINDS[wanted]
        if not fits(value):
            none = "" if wanted == annotation else " or None"
            raise ValueError(f"{prefix}{name} is {value!r:.100}; give {called}{none}.")
