"""Tables in Markdown files, written anew from the JSON that they show."""

from __future__ import annotations

import json
import operator
import re
from pathlib import Path
from typing import Any

from hf_dart.bench import drafts, report, train

BEGIN, END = "<!-- hf-dart table: {file} -->", "<!-- hf-dart table end -->"
"""What a table stands between; FILE is the JSON, seen from the folder of the Markdown file."""
_BEGINS = re.compile(r"<!-- hf-dart table: (\S+) -->\n")


def render_tables(markdown: str, folder: Path) -> str:
    """`markdown` with every table between `BEGIN` and `END` as its JSON has it.

    Args:
        folder: that paths are seen from.

    Raises:
        ValueError: a table has no end, or its file is not what a bench wrote.
    """
    done, rest = "", markdown
    while found := _BEGINS.search(rest):
        _, end, behind = rest[found.end() :].partition(END)
        if not end:
            raise ValueError(f"The table of {found[1]} has no end; put {END!r} behind it.")
        done += f"{rest[: found.end()]}\n{table(folder / found[1])}\n\n{END}"
        rest = behind
    return done + rest


def table(file: Path) -> str:
    """The Markdown of what `hf-dart bench`, `bench train` or `drafts` wrote with `--json`.

    Other scripts may leave their own table in their JSON, as "markdown".

    Raises:
        ValueError: it is none of these.
    """
    try:
        content = json.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"Cannot read {file} ({error}); give what hf-dart bench --json wrote.") from error
    try:
        return _renderer(content)(content)
    except report.UNREADABLE as error:
        raise ValueError(f"{file} is not what hf-dart bench --json writes ({error!r}); measure again.") from error


def _renderer(content: dict[str, Any]) -> Any:
    if "markdown" in content:
        return operator.itemgetter("markdown")
    if "drafts" in content:
        return drafts.as_table
    return train.as_table if "blocks" in content["results"][0] else report.as_table


def render_file(file: Path, head: Path) -> bool:
    """Write the tables of a Markdown file anew, and a card's own part if it is one.

    Args:
        head: the folder of the head that cards are about; their bench.json lies beside them.

    Returns:
        Whether anything has changed.

    Raises:
        ValueError: as `render_tables`; or the card's files are not those of that head.
        OSError: it cannot be read or written.
    """
    from hf_dart.hub.card import has_markers, render_card
    from hf_dart.hub.facts import HeadFacts

    before = file.read_text(encoding="utf8")
    after = render_tables(before, file.parent)
    if has_markers(after):
        after = render_card(HeadFacts.read(head, bench=file.parent / "bench.json"), after)
    if after != before:
        file.write_text(after, encoding="utf8")
    return after != before
