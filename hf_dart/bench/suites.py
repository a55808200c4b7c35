"""Prompts to measure on: cut from files, from suites, from rows of a data set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from hf_dart.errors import UserError, as_user_error, check_text, read_text

_SMALLEST = 4000  # bytes; shorter files are mostly imports
_FOLDER = Path(__file__).parent / "prompts"
PACKAGED = ("code", "chat", "math", "summarisation")
"""Suites that come with the package."""
_READ_AHEAD = 50  # rows looked at for each prompt that is wanted
# Fields of rows that hold a conversation, a text to continue, or a user's question.
_CONVERSATIONS = ("messages", "conversations")
_TEXTS = ("prompt", "text")
_REQUESTS = ("question", "instruction", "problem", "article", "document")


def open_suite(name: str, tokenizer: Any, count: int, most: int | None = None) -> list[list[int]]:
    """Return the token ids of `count` prompts of a packaged suite, a .jsonl file, or anything that `datasets` reads.

    Rows hold `messages` or `conversations`, which the tokenizer's chat template frames up to the last answer; a
    `prompt` or `text` to go on with; or what a user asks (`question`, `instruction`, `problem`, `article`,
    `document`). Without a chat template, what the user says is the prompt.

    Args:
        name: one of `PACKAGED`, a path, or NAME[:CONFIG[:SPLIT]] of the Hub.
        most: tokens of a prompt; longer ones are passed over.

    Raises:
        UserError: there is no such suite, or it has too few prompts.
    """
    prompts: list[list[int]] = []
    for row in islice(_rows(name), _READ_AHEAD * count):
        ids = _encode(row, tokenizer, name)
        if ids and (most is None or len(ids) <= most):
            prompts.append(ids)
        if len(prompts) == count:
            return prompts
    limit = "" if most is None else f" of up to {most} tokens"
    raise UserError(f"{name!r} has {len(prompts)} prompts{limit}, and --prompts asks for {count}; ask for fewer.")


def _rows(name: str) -> Iterator[Any]:
    file = _FOLDER / f"{name}.jsonl" if name in PACKAGED else Path(name)
    if file.suffix == ".jsonl":
        for number, line in enumerate(read_text(file, "the suite ").splitlines(), start=1):
            if line.strip():
                with as_user_error(ValueError, RecursionError, about=f"Line {number} of {str(file)!r} is not JSON"):
                    yield json.loads(line)
        return
    from hf_dart.training.data.documents import open_source

    with as_user_error(about=f"Cannot read the suite {name!r}"):
        yield from open_source([name], split="test", streaming=True).documents


def _encode(row: Any, tokenizer: Any, name: str) -> list[int]:
    """Token ids of one row; none if it asks nothing."""
    known = (*_CONVERSATIONS, *_TEXTS, *_REQUESTS)
    field = next((one for one in known if isinstance(row, dict) and row.get(one) is not None), None)
    if field is None:
        raise UserError(f"A row of {name!r} has none of the fields {', '.join(known)}; name one of them so.")
    text, framed = row[field], False
    if field not in _TEXTS:
        from hf_dart.training.data.chat import apply_template, as_messages

        with as_user_error(about=f"A conversation of {name!r} cannot be read"):
            messages = as_messages(text if field in _CONVERSATIONS else [{"role": "user", "content": text}])
            while messages and messages[-1]["role"] != "user":
                messages.pop()
            if not messages:
                return []
            text, framed = messages[-1].get("content"), bool(tokenizer.chat_template)
            if framed:
                text = apply_template(tokenizer, messages, tokenize=False, add_generation_prompt=True)
    if not isinstance(text, str):
        raise UserError(f"The field {field!r} of {name!r} holds no text; fix it.")
    return tokenizer(check_text(text, f"A row of {name!r}"), add_special_tokens=not framed)["input_ids"]


def texts(files: list[Path] | None = None) -> tuple[str, list[Path]]:
    """Return the name of the text of a measurement, and its files.

    Args:
        files: None stands for the source of the installed pytest, which the packaged pair has never seen.

    Raises:
        UserError: pytest is not installed.
    """
    if files is not None:
        return ", ".join(path.name for path in files), files
    spec = find_spec("_pytest")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "The default text is pytest's own source: install pytest, or give text of your own (bench: name files with "
            "--text; audit: prompts)."
        )
    found = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
    return "pytest's source", [path for path in found if path.stat().st_size >= _SMALLEST]


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
        text = read_text(path)
        before = chosen[:number].count(path)
        share = (before + 1) / (chosen.count(path) + 2)
        start = text.find("\n", int(share * len(text))) + 1
        wanted = length - number * (length // 3) // max(count - 1, 1)
        ids = tokenizer(text[start:], add_special_tokens=False)["input_ids"][:wanted]
        if len(ids) < wanted:
            raise UserError(f"{str(path)!r} is too short for a prompt of {wanted} tokens; lower --prompt-tokens.")
        prompts.append(ids)
    return prompts
