"""Prompts to measure on: benchmarks by their names, packaged suites, rows of a data set, or cut from files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from hf_dart.errors import UserError, as_user_error, check_text, read_text, sentence

Answer = Callable[[list[int]], list[int]]

_LOGGER = logging.getLogger(__name__)
_SMALLEST = 4000  # bytes; shorter files are mostly imports
_FOLDER = Path(__file__).parent / "prompts"
PACKAGED = ("code", "chat", "math", "summarisation")  # suites that come with the package
NAMED = {
    "gsm8k": "openai/gsm8k:main:test",
    "humaneval": "openai/openai_humaneval::test",
    "mbpp": "google-research-datasets/mbpp:full:test",
    "math500": "HuggingFaceH4/MATH-500::test",
    "mt-bench": "HuggingFaceH4/mt_bench_prompts::train",
    "spec-bench": "",
    "speed-bench": "nvidia/SPEED-Bench:qualitative:test",
}
"""Benchmarks by their names, and where the Hub has them."""
_MOST_ROWS = 5000
# Fields of rows: what a user says turn by turn, a conversation, a text to continue, a user's question.
_TURNS = ("turns",)
_CONVERSATIONS = ("messages", "conversations")
_TEXTS = ("prompt", "text")
_REQUESTS = ("question", "instruction", "problem", "article", "document")
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench on the Hub, where a source may not be copied


def open_suite(
    name: str,
    tokenizer: Any,
    count: int,
    most: int | None = None,  # tokens of a prompt; longer ones are passed over
    *,
    least: int = 1,  # prompts of a category; those with fewer are left out where there are several
    answer: Answer | None = None,  # the model's own to a prompt, for the turns after it; None reads first turns alone
    flags: dict[str, Any] | None = None,  # handed to the chat template, such as `enable_thinking`
) -> dict[str, list[list[int]]]:
    """Return the token ids of `count` prompts of each category of a suite; "" is that of rows that name none.

    Rows hold `turns` of a user; `messages` or `conversations`, which the tokenizer's chat template frames up to the
    last answer; a `prompt` or `text` to go on with; or what a user asks (`question`, `instruction`, `problem`,
    `article`, `document`). Without a chat template, what was said is the prompt, with blank lines between. Rows that
    cannot be used are left out, with a warning. A suite is one of `PACKAGED` or `NAMED`, NAME=FILE (or folder) for one
    of those, a path, or NAME[:CONFIG[:SPLIT]] of the Hub.
    """
    found: dict[str, list[list[int]]] = {}
    unusable: list[str] = []
    for row in islice(_rows(name), _MOST_ROWS):
        category = str((row.get("category") if isinstance(row, dict) else None) or "")
        prompts = found.setdefault(category, [])
        try:
            if len(prompts) < count:
                new = _prompts(row, name, tokenizer, answer, flags or {})
                prompts += islice((ids for ids in new if ids and len(ids) <= (most or len(ids))), count - len(prompts))
        except UserError as error:
            unusable.append(str(error))
        if list(found) == [""] and len(prompts) == count:
            break
    told = f"{len(unusable)} rows of {name!r} are left out; of the first: {unusable[0]}" if unusable else ""
    largest = max(map(len, found.values()), default=0)
    enough = {category: prompts for category, prompts in found.items() if len(prompts) >= least}
    if not enough or (len(found) == 1 and largest < count):
        limit = "" if most is None else f" of up to {most} tokens"
        few = f"{name!r} has {largest} prompts{limit}, and --prompts asks for {count}; ask for fewer."
        raise UserError(few if largest else told or f"{name!r} holds no prompt{limit}; give another file.")
    small = ", ".join(repr(category) for category, prompts in found.items() if 0 < len(prompts) < least)
    for warning in filter(None, (told, small and f"Categories with less than {least} prompts are left out: {small}.")):
        _LOGGER.warning(warning)
    return enough


def _rows(name: str) -> Iterator[Any]:
    """Yield the rows of a suite; an error in place of one that cannot be read."""
    named, given, place = name.partition("=")
    place = (place if given else NAMED[named]) if named in NAMED else name
    if given and not place:
        raise UserError(f"--suite {name} names no file; give one, or leave = out for that of the Hub.")
    if not place:
        raise UserError(f"The Hub has no {named}; name its file, as --suite {named}=question.jsonl.")
    file = _FOLDER / f"{name}.jsonl" if name in PACKAGED else Path(place)
    if file.suffix == ".jsonl":
        for number, line in enumerate(read_text(file, "the suite ").split("\n"), start=1):
            try:
                if line.strip():
                    yield json.loads(line)
            except (ValueError, RecursionError) as error:
                yield UserError(f"Line {number} is not JSON ({sentence(error)}); fix it.")
        return
    from hf_dart.training.data.documents import open_source

    with as_user_error(about=f"Cannot read the suite {name!r}"):
        yield from open_source([place], split="test", streaming=True).documents


def _prompts(row: Any, name: str, tokenizer: Any, answer: Answer | None, flags: dict[str, Any]) -> Iterator[list[int]]:
    """Yield the token ids of the prompts of one row: one for each turn."""
    known = (*_CONVERSATIONS, *_TURNS, *_TEXTS, *_REQUESTS)
    field = next((one for one in known if isinstance(row, dict) and row.get(one) is not None), None)
    if field is None:
        has_none = f"It has none of the fields {', '.join(known)}; name one of them so."
        raise row if isinstance(row, UserError) else UserError(has_none)
    said, whole = row[field], field in _CONVERSATIONS
    asks = name.partition("=")[0] in NAMED.keys() - {"humaneval"}  # MBPP asks for what is in `text`
    if field in _TEXTS and isinstance(said, str) and not asks:
        yield tokenizer(check_text(said, "Its text"))["input_ids"]
        return
    from hf_dart.training.data.chat import Message, as_messages

    messages: list[Message] = []
    ids: list[int] = []
    for turn in said if isinstance(said, list) and not whole else [said]:
        if messages:
            if answer is None:
                return
            messages.append({"role": "assistant", "content": tokenizer.decode(answer(ids), skip_special_tokens=True)})
        with as_user_error(about="It cannot be read"):
            messages += as_messages(turn if whole else [{"role": "user", "content": turn}])
            ids = _encode(messages, tokenizer, flags)
        yield ids


def _encode(messages: list[dict[str, Any]], tokenizer: Any, flags: dict[str, Any]) -> list[int]:
    """Token ids of a conversation up to the next answer; none if it asks nothing."""
    from hf_dart.training.data.chat import apply_template

    while messages and messages[-1]["role"] != "user":
        messages.pop()
    texts: list[Any] = [message.get("content") for message in messages]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("A message holds no text; fix it.")
    if any(_PLACEHOLDER in text for text in texts):
        raise ValueError("The Hub has a placeholder there; make the data as its card says and name the folder.")
    framed = bool(tokenizer.chat_template and messages)
    text = "\n\n".join(texts)
    if framed:
        text = apply_template(tokenizer, messages, tokenize=False, add_generation_prompt=True, **flags)
    return tokenizer(check_text(text, "It"), add_special_tokens=not framed)["input_ids"] if messages else []


def texts(files: list[Path] | None = None) -> tuple[str, list[Path]]:
    """Return the name of the text of a measurement, and its files.

    By default, it is the source of the installed pytest, which the packaged pair has never seen.
    """
    if files is not None:
        return ", ".join(path.name for path in files), files
    spec = find_spec("_pytest")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("The default text is pytest's source: install that, or give --text FILES (audit: prompts).")
    found = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
    return "pytest's source", [path for path in found if path.stat().st_size >= _SMALLEST]


def cut_prompts(tokenizer: Any, files: list[Path], count: int, length: int) -> list[list[int]]:
    """`count` prompts of two thirds of `length` up to `length` tokens, so that batches are ragged.

    Evenly spaced files give one each, from a line a third of the way in; fewer files than prompts are cut in
    several places.
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
