"""Training text in the target's own words: the replies of a data set, written again by the target.

A head drafts the target's text, not that of a corpus. Conversations keep their users' messages and get new replies,
turn by turn; of other text, the beginnings are continued.

The work is cut into batches by the data and the settings alone, and what is random about a batch goes by its number:
the output depends neither on how often the work was interrupted nor on how many processes shared it. Each batch is a
file of its own, which is there when all of it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hf_dart.errors import check_fields
from hf_dart.training.data.chat import Message
from hf_dart.training.data.documents import group_files
from hf_dart.training.data.encoding import Encoder
from hf_dart.training.data.packing import cut
from hf_dart.training.data.sources import DataArguments, open_encoded
from hf_dart.training.regenerate.sampling import Sampling
from hf_dart.training.regenerate.writers import Writer

_WINDOW = 16  # batches whose conversations are sorted by length, so that those of a batch are alike

Conversation = tuple[list[Message], Any]


@dataclass(frozen=True)
class RegenerateSettings:
    """Settings of `regenerate`: how long, how random and in which batches the new text is.

    Args:
        length: tokens of a piece of text, prefix included; conversations longer than that get no more replies.
        new_tokens: the most tokens of a reply.
        prefix: from how many to how many tokens of a piece of text are kept; one number is drawn per batch.
        mixture: how rows are written; which of these is drawn for every row, by their shares.
        batch_size: rows written at a time.
        seed: of all that is drawn.

    Raises:
        ValueError: a field is out of range.
    """

    length: int = 2048
    new_tokens: int = 1024
    prefix: tuple[int, int] = (32, 128)
    mixture: tuple[Sampling, ...] = (Sampling(),)
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, least={"length": 1, "new_tokens": 1, "batch_size": 1})
        if not 1 <= self.prefix[0] <= self.prefix[1] < self.length:
            raise ValueError(
                f"prefix is {self.prefix[0]} to {self.prefix[1]} tokens, of rows of length {self.length}; give two "
                f"numbers from 1 to {self.length - 1}, the smaller one first, or a greater length."
            )


class Batch(NamedTuple):
    """Rows that are written together, in one of the ways of a mixture.

    They are pieces of text as token ids, or conversations, each with its number.
    """

    number: int
    rows: Sequence[tuple[int, Any]]
    encoder: Encoder
    way: int


def plan(sources: Iterable[tuple[Any, Encoder]], settings: RegenerateSettings) -> Iterator[Batch]:
    """All batches of the sources (documents of `datasets`, and their encoder), in the order of their numbers."""
    row = index = 0
    random = np.random.default_rng(settings.seed)
    shares = np.array([sampling.share for sampling in settings.mixture])
    size = settings.batch_size
    for documents, encoder in sources:
        contents: Iterator[Any] = (
            _conversations(documents, encoder) if encoder.kind == "messages" else _pieces(documents, encoder, settings)
        )
        while window := list(islice(contents, _WINDOW * size)):
            drawn = random.choice(len(shares), len(window), p=shares / shares.sum()).tolist()
            batches = []
            # A batch has rows of one way: each has what it drew, and a call of `generate` takes one temperature.
            for way in range(len(shares)):
                rows = [(row + at, content) for at, content in enumerate(window) if drawn[at] == way]
                if encoder.kind == "messages":
                    rows.sort(key=lambda entry: len(json.dumps(entry[1])))
                batches += [(rows[start : start + size], encoder, way) for start in range(0, len(rows), size)]
            row += len(window)
            # Otherwise a run with few rows left would write short ones only.
            for at in random.permutation(len(batches)).tolist():
                yield Batch(index, *batches[at])
                index += 1


def _pieces(documents: Any, encoder: Encoder, settings: RegenerateSettings) -> Iterator[list[int]]:
    """Documents cut to the length of a row; an end that is too short for a prefix is left out, a document is not."""
    eos = encoder.tokenizer.eos_token_id
    for examples in documents.iter(100):
        for ids, mask in encoder.encode(examples):
            text = ids[:-1] if len(ids) and ids[-1] == eos else ids
            pieces = cut(text, mask, settings.length, encoder.tokenizer.bos_token_id)
            for number, (piece, _) in enumerate(pieces):
                if len(piece) >= (settings.prefix[0] if number else 1):
                    yield piece.tolist()


def _conversations(documents: Any, encoder: Encoder) -> Iterator[Conversation]:
    """Conversations up to the first use of a tool, whose result would not fit another call."""
    for examples in documents.iter(100):
        for messages, tools in encoder.conversations(examples):
            uses = (at for at, message in enumerate(messages) if message["role"] == "tool" or "tool_calls" in message)
            kept = messages[: next(uses, len(messages))]
            if any(message["role"] == "user" for message in kept):
                yield kept, tools


def write_batch(batch: Batch, writer: Writer, settings: RegenerateSettings) -> list[dict[str, Any]]:
    """Return the records of a batch.

    Text: `text`, `input_ids`, `prompt_tokens` (how many of them were given). Conversations: `messages`, `tools`. Both:
    `row`, its number, and `sampling`, the number of the entry of the mixture.
    """
    random = np.random.default_rng([settings.seed, batch.number])
    prefix = int(random.integers(settings.prefix[0], settings.prefix[1] + 1))
    seed = int(random.integers(2**31))
    sampling = settings.mixture[batch.way]
    if batch.encoder.kind == "messages":
        records = _rewrite(batch, writer, sampling, settings, seed)
    else:
        # One prefix length per batch: nothing is padded but prefixes of shorter documents.
        prompts = [piece[:prefix] for _, piece in batch.rows]
        new_tokens = min(settings.length - prefix, settings.new_tokens)
        written = writer.continue_texts(prompts, new_tokens, sampling, seed)
        records = [
            {
                "text": batch.encoder.tokenizer.decode([*prompt, *new], skip_special_tokens=True),
                "input_ids": [*prompt, *new],
                "prompt_tokens": len(prompt),
            }
            for prompt, new in zip(prompts, written, strict=True)
        ]
    return [
        {**record, "row": number, "sampling": batch.way}
        for (number, _), record in zip(batch.rows, records, strict=True)
        if record is not None
    ]


def _rewrite(
    batch: Batch, writer: Writer, sampling: Sampling, settings: RegenerateSettings, seed: int
) -> list[dict[str, Any] | None]:
    """Return a new message in place of every assistant's, after the new ones before it.

    One that does not end is the last, and the one before a call of a tool.
    """
    encoder = batch.encoder
    assert encoder.chat is not None
    tools = [tools for _, (_, tools) in batch.rows]
    rest = [list(messages) for _, (messages, _) in batch.rows]
    histories: list[list[Message]] = [[] for _ in rest]
    written = [0] * len(rest)
    active, seed_of_turn = list(range(len(rest))), seed
    while active:
        ready = []
        for at in active:
            history = histories[at]
            while rest[at] and (rest[at][0]["role"] != "assistant" or not history):
                history.append(rest[at].pop(0))
            del rest[at][:1]
            if history[-1]["role"] != "assistant":
                prompt = encoder.chat.render(history, prompt=True, tools=tools[at])
                ids = encoder.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
                if len(ids) < settings.length:
                    ready.append(at)
        if not ready:
            break
        asked = [(histories[at], tools[at]) for at in ready]
        active = []
        for at, reply in zip(ready, writer.reply(asked, settings.new_tokens, sampling, seed_of_turn), strict=True):
            if reply.message is not None:
                histories[at].append(reply.message)
                written[at] = len(histories[at])
            if reply.finished and rest[at]:
                active.append(at)
        seed_of_turn += len(rest)
    return [
        {"messages": history[:count], **({"tools": own} if own else {})} if count else None
        for history, count, own in zip(histories, written, tools, strict=True)
    ]


def begin(folder: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
    """Write down how the text is made, or check that the text in the folder was made so.

    Args:
        folder: of the output; made if need be.
        settings: all that the text depends on.
        about: what else is worth knowing: versions, the head.

    Raises:
        ValueError: the folder was begun with other settings, or nothing says with which.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    settings = json.loads(json.dumps(settings))
    if file.is_file():
        try:
            before = dict(json.loads(file.read_text(encoding="utf8"))["settings"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"{file} holds no settings; name another folder.") from error
        for name in sorted({*before, *settings}):
            if before.get(name) != settings.get(name):
                raise ValueError(
                    f"{folder} was begun with other settings: {name} differs from {file}; give the same, or another "
                    "folder."
                )
    elif any(folder.glob("*.jsonl")):
        raise ValueError(f"{folder} holds text, and no {file.name} that says how it was made; name another folder.")
    else:
        _write(file, json.dumps({"settings": settings, "about": about}, indent=2) + "\n")


def _write(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    written = file.with_name(f"{file.name}.{os.getpid()}")  # several processes may write the settings at once
    try:
        written.write_text(text, encoding="utf8")
        written.replace(file)
    finally:
        written.unlink(missing_ok=True)


def open_sources(arguments: DataArguments, tokenizer: Any, seed: int) -> list[tuple[Any, Encoder]]:
    """Return the documents, shuffled unless they are streamed, and the encoder of each source.

    Raises:
        ValueError: a source cannot be read.
    """
    sources = []
    for names in group_files(arguments.train_data):
        documents, encoder = open_encoded(arguments, names, "train", tokenizer, 1)
        sources.append((documents if arguments.streaming else documents.shuffle(seed=seed), encoder))
    return sources


def describe(
    arguments: DataArguments, sources: list[tuple[Any, Encoder]], settings: RegenerateSettings
) -> dict[str, Any]:
    """All of the data and the settings that the text depends on, for `begin`."""
    counts = [None if arguments.streaming else len(documents) for documents, _ in sources]
    chat = next((encoder.chat for _, encoder in sources if encoder.chat is not None), None)
    return {
        "sources": list(arguments.train_data),
        "documents": counts,
        "chat_template": None if chat is None else chat.template_text,
        "enable_thinking": arguments.enable_thinking,
        "sampling_drawn": "for every row",  # it was for every batch once: those files do not go on with these
        **asdict(settings),
    }


def regenerate(
    sources: list[tuple[Any, Encoder]],
    writer: Writer,
    settings: RegenerateSettings,
    folder: Path,
    *,
    rank: int = 0,
    processes: int = 1,
    rows: int | None = None,
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Write this process's batches, every `processes`-th, as files batch-N.jsonl; those that are there stay.

    Args:
        sources: as `open_sources` gives them.
        writer: who writes.
        settings: what is written.
        folder: of the output, as `begin` leaves it.
        rank, processes: which part of the batches is this process's.
        rows: write batches until they hold so many of all rows; None for all.

    Yields:
        After each batch its number and records, which are in its file by then.

    Raises:
        ValueError, ConnectionError: as for the writer.
        OSError: the disk is full, or else refuses a batch; those before it are kept.
    """
    planned = 0
    for batch in plan(sources, settings):
        if rows is not None and planned >= rows:
            return
        planned += len(batch.rows)
        file = folder / f"batch-{batch.number:07}.jsonl"
        if batch.number % processes == rank and not file.is_file():
            records = write_batch(batch, writer, settings)
            _write(file, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
            yield batch.number, records
