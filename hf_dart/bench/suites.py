"""Text to measure on: prompts cut from files."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_dart.pair import UserError

_SMALLEST = 4000  # bytes; shorter files are mostly imports


def default_files() -> list[Path]:
    """Source files of the installed pytest, which the packaged pair has never seen.

    Raises:
        UserError: pytest is not installed.
    """
    spec = find_spec("_pytest")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "The default text is pytest's own source: install pytest, or give text of your own (bench: name files with "
            "--text; audit: prompts)."
        )
    found = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
    return [path for path in found if path.stat().st_size >= _SMALLEST]


def cut_prompts(tokenizer: Any, files: list[Path], count: int, length: int) -> list[list[int]]:
    """`count` prompts of two thirds of `length` up to `length` tokens, so that batches are ragged.

    Evenly spaced files give one each, from a line a third of the way in; fewer files than prompts are cut in
    several places.

    Raises:
        UserError: a file cannot be read or is too short.
    """
    chosen = [files[i * len(files) // count] for i in range(count)]
    prompts: list[list[int]] = []
    for number, path in enumerate(chosen):
        try:
            text = path.read_text(encoding="utf8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"Cannot read {str(path)!r} as text: {error}") from error
        before = chosen[:number].count(path)
        share = (before + 1) / (chosen.count(path) + 2)
        start = text.find("\n", int(share * len(text))) + 1
        wanted = length - number * (length // 3) // max(count - 1, 1)
        ids = tokenizer(text[start:], add_special_tokens=False)["input_ids"][:wanted]
        if len(ids) < wanted:
            raise UserError(f"{str(path)!r} is too short for a prompt of {wanted} tokens; lower --prompt-tokens.")
        prompts.append(ids)
    return prompts
