"""Prompts for the text that a head for Gemma 3 270M learns from: conversations and problems that others wrote.

    python examples/gemma3_270m/prompts.py FOLDER runs/gemma/prompts.jsonl

FOLDER holds ShareGPT's conversations in `sharegpt*.json` or `.jsonl` (`conversations` with `from` and `value`) and
GSM8K's training half in `gsm8k_train.jsonl` (`question`, `answer`). The output has a `text` in every row, as a base
model goes on with: `User: ...` and `Assistant: ...`, and problems with their answers, four at a time.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

NAMES = {"human": "User", "user": "User", "gpt": "Assistant", "assistant": "Assistant"}
SOLVED = 4
"""Problems with their answers in one row."""


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    """Objects of a file of JSON, or of JSON lines."""
    if file.suffix == ".jsonl":
        with file.open(encoding="utf8") as lines:
            yield from map(json.loads, lines)
    else:
        yield from json.loads(file.read_text(encoding="utf8"))


def conversations(file: Path) -> Iterator[str]:
    """Conversations that a user begins, as text."""
    for row in rows_of(file):
        turns = [turn for turn in row["conversations"] if turn["from"] in NAMES]
        if turns and NAMES[turns[0]["from"]] == "User":
            yield "\n".join(f"{NAMES[turn['from']]}: {turn['value']}" for turn in turns)


def problems(file: Path) -> Iterator[str]:
    """Problems and their answers, without the marks of a calculator."""
    solved = (
        f"Question: {row['question']}\nAnswer: {re.sub('<<.*?>>', '', row['answer'])}" for row in rows_of(file)
    )
    while some := list(islice(solved, SOLVED)):
        yield "\n\n".join(some)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the files")
    parser.add_argument("output", type=Path, help="file to write")
    parser.add_argument("--rows", type=int, help="take so many of each file (default: all)")
    given = parser.parse_args()
    files = [(file, conversations) for file in sorted(given.folder.glob("sharegpt*.json*"))]
    files += [(file, problems) for file in sorted(given.folder.glob("gsm8k_train.jsonl"))]
    if not files:
        raise SystemExit(f"{given.folder} holds neither sharegpt*.json nor gsm8k_train.jsonl; name their folder.")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with given.output.open("w", encoding="utf8") as output:
        for file, texts in files:
            count = 0
            for text in islice(texts(file), given.rows):
                output.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                count += 1
            print(f"{file.name}: {count} rows")


if __name__ == "__main__":
    main()
