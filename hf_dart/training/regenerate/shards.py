"""Training text in the target's own words: the replies of a data set, written again by the target.

A head drafts the target's text, not that of a corpus. Conversations keep their users' messages and get new replies,
turn by turn; of other text, the beginnings are continued.

Each row is written as the target writes it alone, and what is random about it goes by its number: the output depends
neither on how often the work was interrupted, nor on how many rows or processes wrote at a time.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, takewhile
from pathlib import Path
from time import monotonic
from typing import Any

from transformers import PreTrainedModel

from hf_dart.decoding.suffix_store import SuffixStore
from hf_dart.models.tokenizers import end_tokens
from hf_dart.serve.batcher import Batcher
from hf_dart.training.data.chat import Message
from hf_dart.training.data.documents import group_files
from hf_dart.training.data.encoding import Encoder
from hf_dart.training.data.packing import cut
from hf_dart.training.data.sources import DataArguments, open_encoded
from hf_dart.training.regenerate.writer import RegenerateSettings, Row, Writer


def rows_of(sources: Iterable[tuple[Any, Encoder]], settings: RegenerateSettings) -> Iterator[Row]:
    """All rows of the sources (documents of `datasets`, and their encoder), in the order of their numbers."""
    number = 0
    for documents, encoder in sources:
        talks = encoder.kind == "messages"
        for content in _conversations(documents, encoder) if talks else _pieces(documents, encoder, settings):
            yield Row(number, content, encoder)
            number += 1


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


def _conversations(documents: Any, encoder: Encoder) -> Iterator[tuple[list[Message], Any]]:
    """Conversations up to the first use of a tool, whose result would not fit another call."""
    for examples in documents.iter(100):
        for messages, tools in encoder.conversations(examples):
            uses = (at for at, message in enumerate(messages) if message["role"] == "tool" or "tool_calls" in message)
            kept = messages[: next(uses, len(messages))]
            if any(message["role"] == "user" for message in kept):
                yield kept, tools


def keep_settings(folder: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
    """Write down how the text of a folder is made, and what is `about` it; or check that earlier text was made so."""
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
                raise ValueError(f"In {folder} {name} differs; give it as in its {file.name}, or another folder.")
    elif any(folder.glob("*.jsonl")):
        raise ValueError(f"{folder} holds text, and no {file.name} that says how it was made; name another folder.")
    else:
        written = file.with_name(f"{file.name}.{os.getpid()}")  # several processes may write it at once
        written.write_text(json.dumps({"settings": settings, "about": about}, indent=2) + "\n", encoding="utf8")
        written.replace(file)


def open_sources(arguments: DataArguments, tokenizer: Any, seed: int) -> list[tuple[Any, Encoder]]:
    """Return the documents, shuffled unless they are streamed, and the encoder of each source."""
    sources = []
    for names in group_files(arguments.train_data):
        documents, encoder = open_encoded(arguments, names, "train", tokenizer, 1)
        sources.append((documents if arguments.streaming else documents.shuffle(seed=seed), encoder))
    return sources


def regenerate(
    sources: list[tuple[Any, Encoder]],  # of `open_sources`
    model: PreTrainedModel,
    head: Any,
    settings: RegenerateSettings,
    folder: Path,  # as `keep_settings` leaves it
    *,
    shard: tuple[int, int] = (1, 1),  # its number i, from 1 on, and n; all shards together hold the rows of (1, 1)
    seats: int = 32,  # rows that are written at a time
    rows: int | None = None,  # of all shards together, the first so many; None for all
    minutes: float = math.inf,  # after which no more rows are begun
) -> Iterator[dict[str, Any]]:
    """Write one shard of the rows, every n-th, to a file of its own; what is there stays, and the rest is added.

    Yielded is each record (`Writer.record`), which is in the file by then. If a row fails, those before it are kept.
    """
    number, count = shard
    file = folder / f"rows-{number}-of-{count}.jsonl"
    first = _next_row(file)
    own = (row for row in islice(rows_of(sources, settings), rows) if row.number % count == number - 1)
    end = monotonic() + 60 * minutes
    left = takewhile(lambda _: monotonic() < end, (row for row in own if row.number >= first))
    most = seats * (settings.length + settings.new_tokens)
    # If this ends early, the batcher ends first: the threads, which wait for it, end with it.
    with ThreadPoolExecutor(seats) as pool, Batcher(model, head, seats=seats, max_tokens=most) as batcher:
        memory = None if head is None else SuffixStore()
        writer = Writer(batcher, {*end_tokens(model, sources[0][1].tokenizer)}, settings, memory)
        written = deque(pool.submit(writer.record, row) for row in islice(left, 2 * seats))
        while written:
            record = written.popleft().result()
            written.extend(pool.submit(writer.record, row) for row in islice(left, 1))
            if record is not None:
                _append(file, json.dumps(record, ensure_ascii=False) + "\n")
                yield record


def _next_row(file: Path) -> int:
    """Return the number of the row to go on with; cut off half a line, of a process that was killed."""
    end, last = 0, b'{"row": -1}'
    with file.open("a+b") as lines:
        lines.seek(0)
        for line in lines:
            if line.endswith(b"\n"):
                end, last = end + len(line), line
        lines.truncate(end)
    return json.loads(last)["row"] + 1


def _append(file: Path, line: str) -> None:
    """Add a line to a file, whole or not at all."""
    before = file.stat().st_size
    try:
        with file.open("ab") as lines:
            lines.write(line.encode())
    except OSError:
        os.truncate(file, before)
        raise
