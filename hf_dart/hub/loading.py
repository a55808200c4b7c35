"""Loading a target and its tokenizer by name, with errors of one sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hf_dart.errors import UserError, as_user_error, head_inside, missing_folder

PACKAGED = "packaged"
"""The name by which `--target` and `--head` take the pair that comes with the package, which is the default."""
PACKAGED_TARGET, PACKAGED_HEAD = (Path(__file__).parents[1] / "demo_pair" / part for part in ("model", "head"))
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")


def target_path(target: str | None) -> str:
    """Return the folder or Hub id that a target's name stands for; None is `PACKAGED`, and ~ the user's own folder."""
    return str(PACKAGED_TARGET) if target in (None, "", PACKAGED) else os.path.expanduser(str(target))


def head_path(head: str) -> str:
    """Return the folder or Hub id that a head's name stands for."""
    return str(PACKAGED_HEAD) if head == PACKAGED else head


def load_tokenizer(name: str | None = None, **options: Any) -> Any:
    """Load the tokenizer of a target, or of a folder or Hub id that holds a tokenizer alone; `options` as there."""
    from transformers import AutoTokenizer

    path = target_path(name)
    if missing_folder(path):
        raise UserError(f"There is no folder {path!r}; give the tokenizer as a folder or a Hub id.")
    with as_user_error(Exception, about=f"Cannot load the tokenizer of {path!r}"):  # as in load_target
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):  # made up by transformers, without files
        raise UserError(f"{path!r} holds no tokenizer; save the model's own there with tokenizer.save_pretrained.")
    return tokenizer


def load_target(
    target: str | None = None,  # folder or Hub id, or `PACKAGED`, the default
    dtype: str | None = None,  # one of `DTYPES`; None is float32 for the packaged target, else as weights were saved
    device_map: Any = None,
    *,
    tokenizer: str | None = None,  # folder or Hub id; None is the target's own
    **options: Any,  # of `from_pretrained` of the model; `revision` is also the tokenizer's
) -> tuple[Any, Any]:
    """Load a target and its tokenizer."""
    from transformers import AutoModelForCausalLM

    path = target_path(target)
    dtype = dtype or ("float32" if path == str(PACKAGED_TARGET) else "auto")
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; give one of {', '.join(DTYPES)}.")
    if missing_folder(path) or Path(path).is_file():
        raise UserError(f"There is no folder {path!r}; give the target as a folder or a Hub id.")
    if Path(path).is_dir() and not Path(path, "config.json").is_file():
        remedy = head_inside(path) or "give the folder that the target was saved to."
        raise UserError(f"The folder {path!r} holds no config.json; {remedy}")
    revision = {"revision": options["revision"]} if "revision" in options and tokenizer is None else {}
    # Whatever transformers, safetensors and tokenizers raise of damaged files.
    with as_user_error(Exception, about=f"Cannot load the target {path!r}"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device_map, **options)
    return model, load_tokenizer(tokenizer or path, **revision)
