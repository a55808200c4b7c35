"""Markdown with tables, laid out for a terminal of so many columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import wrap

_GAP = 2  # columns between cells
_NUMBER = re.compile(r"[\d.,%\s\[\]-]*\d[\d.,%\s\[\]-]*")


def laid_out(markdown: str, width: int) -> str:
    """Tables with aligned columns, and sentences of at most `width` characters; marks of Markdown are left out.

    Cells that are too wide are broken between words. Where even that does not do, the first column becomes headings
    over the rows that share it.
    """
    lines: list[str] = []
    for is_table, group in groupby(markdown.splitlines(), key=lambda line: line.startswith("|")):
        for block in [list(group)] if is_table else ([line] for line in group):
            found = _table(block, width) if is_table else wrap(_plain(block[0]), width, break_on_hyphens=False) or [""]
            lines += found
    return "\n".join(lines)


def _plain(text: str) -> str:
    return text.replace("**", "").replace("`", "")


def _table(lines: list[str], width: int) -> Iterator[str]:
    rows = [[_plain(cell).strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    del rows[1]  # the rule below the names
    # Numbers stand under each other to the right, words to the left.
    right = [all(_NUMBER.fullmatch(cell) or not cell for cell in column[1:]) for column in zip(*rows, strict=True)]
    return _columns(rows, right, width)


def _columns(rows: list[list[str]], right: list[bool], width: int) -> Iterator[str]:
    widths = _widths(rows, width)
    if widths is None and len(rows[0]) > 1:
        (title, *names), *others = rows
        for value, group in groupby(others, key=lambda row: row[0]):
            yield from wrap(f"{title} {value}:", width)
            yield from _columns([names, *(row[1:] for row in group)], right[1:], width)
        return
    for number, row in enumerate(rows):
        yield from _row(row, right, widths or [width])
        if number == 0:
            yield (" " * _GAP).join("-" * one for one in widths or [width])


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """How wide the columns are that together fill at most `width`; None if words would have to be broken."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    room = width - _GAP * (len(columns) - 1)
    while sum(widths) > room:
        wide = [place for place, one in enumerate(widths) if one > least[place]]
        if not wide:
            return None
        widths[max(wide, key=lambda place: widths[place])] -= 1
    return widths


def _row(cells: Sequence[str], right: Sequence[bool], widths: Sequence[int]) -> Iterator[str]:
    """The lines of one row, as many as its highest cell has."""
    parts = [wrap(cell, room, break_on_hyphens=False) for cell, room in zip(cells, widths, strict=True)]
    for line in range(max(1, *map(len, parts))):
        pieces = [part[line] if line < len(part) else "" for part in parts]
        aligned = [
            piece.rjust(room) if to_right else piece.ljust(room)
            for piece, to_right, room in zip(pieces, right, widths, strict=True)
        ]
        yield (" " * _GAP).join(aligned).rstrip()
