"""A target and its drafter, loaded together from folders or the Hub, for the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hf_dart.errors import UserError, as_user_error
from hf_dart.target.loading import check_path, load_target

PACKAGED_HEAD = Path(__file__).parents[1] / "demo_pair" / "head"


class Pair(NamedTuple):
    """What `model.generate(..., assistant=head)` needs, and the name of each for reports."""

    model: Any  # transformers takes seconds to import, and `hf-dart --help` imports this
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


def load_head(path: str, model: Any, tokenizer: Any, dtype: str | None = None) -> Any:
    """Load a head for a target and attach it; errors as for `load_pair`.

    Args:
        path: folder or Hub id.
        model, tokenizer: the target.
        dtype: of the head; None is the target's, "auto" as it was saved.
    """
    from hf_dart.drafters.registry import load_drafter

    check_path("head", path)
    options = {} if dtype is None else {"dtype": dtype}
    with as_user_error(OSError, ValueError, RuntimeError, about=f"Cannot load the head {path!r}"):
        return load_drafter(path, target=model, tokenizer=tokenizer, **options)
