"""A target and its drafter, loaded together from folders or the Hub, for the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

PACKAGED_TARGET = Path(__file__).parent / "demo_pair" / "target"
PACKAGED_HEAD = Path(__file__).parent / "demo_pair" / "head"
LEAST_TEMPERATURE = 1e-6
"""Of sampling; logits divided by much less would be no numbers any more."""
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")


class UserError(Exception):
    """Something that the caller of a command can mend; the message is one sentence."""


class Pair(NamedTuple):
    """What `model.generate(..., assistant=head)` needs, and the name of each for reports."""

    model: Any
    head: Any
    tokenizer: Any
    target_name: str
    head_name: str


def load_pair(
    target: str | None = None,
    head: str | None = None,
    dtype: str | None = None,
    device_map: str | None = None,
) -> Pair:
    """Load a target, its tokenizer and its head, attached.

    Args:
        target, head: folder or Hub id; None for the packaged pair.
        dtype: one of `DTYPES`; None is float32 for the packaged target, else as its weights were saved.
        device_map: as for `from_pretrained`.

    Raises:
        UserError: one of them cannot be loaded or they do not fit.
    """
    if (target is None) != (head is None):
        missing, given = ("--target", "--head") if target is None else ("--head", "--target")
        raise UserError(f"A head and its target belong together: give {missing} too, or leave {given} out.")
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model, tokenizer = load_target(target, dtype, device_map)
    drafter = load_head(head or str(PACKAGED_HEAD), model, tokenizer)
    names = [shown_name(given) if given else f"packaged {what}" for given, what in ((target, "target"), (head, "head"))]
    return Pair(model, drafter, tokenizer, *names)


def shown_name(path: str) -> str:
    """What reports call a model: a folder's path says nothing on another machine; its name may."""
    folder = Path(path).resolve()
    if not folder.is_dir():
        return path
    return folder.parent.name if folder.name == "final" else folder.name  # `hf-dart train` writes RUN/final


def load_head(path: str, model: Any, tokenizer: Any) -> Any:
    """Load a head for a target and attach it; errors as for `load_pair`."""
    from hf_dart.drafters import load_drafter

    _check_path("head", path)
    try:
        return load_drafter(path, target=model, tokenizer=tokenizer)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"Cannot load the head {path!r}: {sentence(error)}") from error


def load_tokenizer(target: str | None = None) -> Any:
    """Load a target's tokenizer alone; arguments and errors as for `load_pair`."""
    path = target or str(PACKAGED_TARGET)
    _check_path("target", path)
    return read_tokenizer(path)


def read_tokenizer(path: str) -> Any:
    """Load the tokenizer in a folder or on the Hub, with a model beside it or without.

    Raises:
        UserError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # as in load_target
        raise UserError(f"Cannot load the tokenizer of {path!r}: {sentence(error)}") from error


def load_target(
    target: str | None = None,
    dtype: str | None = None,
    device_map: Any = None,
    *,
    tokenizer: str | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Load a target and its tokenizer.

    Args:
        target, dtype, device_map: as for `load_pair`.
        tokenizer: folder or Hub id; None is the target's own.
        options: as for `from_pretrained` of the model; `revision` is also the tokenizer's.

    Raises:
        UserError: one of them cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = target or str(PACKAGED_TARGET)
    dtype = dtype or ("float32" if target is None else "auto")
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; give one of {', '.join(DTYPES)}.")
    _check_path("target", path)
    if device_map is not None:
        options["device_map"] = device_map
    revision = {"revision": options["revision"]} if "revision" in options and tokenizer is None else {}
    try:
        return (
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options),
            AutoTokenizer.from_pretrained(tokenizer or path, **revision),
        )
    except Exception as error:  # whatever transformers, safetensors and tokenizers raise of damaged files
        raise UserError(f"Cannot load the target {path!r}: {sentence(error)}") from error


def missing_folder(path: str | Path) -> bool:
    """Can it only be a folder, as it is no id of the Hub, and is there none?"""
    name = str(path)
    local = name.startswith((".", "~", "\\")) or Path(path).is_absolute() or name.count("/") > 1
    return local and not Path(path).is_dir()


def _check_path(what: str, path: str) -> None:
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"The folder {path!r} holds no config.json; give the folder that the {what} was saved to.")
    elif missing_folder(path) or folder.exists():
        raise UserError(f"There is no folder {path!r}; give the {what} as a folder or a Hub id.")


def check_text(text: str, what: str) -> str:
    """The text, which can be tokenized: command lines and JSON may bring half a character.

    Raises:
        UserError: it is no Unicode text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} holds bytes that are no UTF-8 text ({error.reason}); mend it.") from error
    return text


def sentence(error: BaseException) -> str:
    """The first sentence of an error's message, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[a-z)'\"])\. (?=[A-Z])", text, maxsplit=1)[0][:500]
