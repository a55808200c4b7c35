"""Every error text of the library, read from its code: what docs/troubleshooting.md has to list.

python tests/support/messages.py    # writes the list into that page again
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
MARKERS = "<!-- messages -->\n", "<!-- /messages -->\n"

# A heading for each room, in the order of the page, and the modules that belong elsewhere than their room says.
ROOMS = {
    "Calls of generate": ("decoding", "cache", "errors.py", "view"),
    "Targets": ("target",),
    "Drafters, heads and adapters": ("drafters",),
    "Compiled rounds": ("engine",),
    "Trees and n-gram tables": ("trees",),
    "Files of other projects": ("interop",),
    "The Hub and cards": ("hub",),
    "Training and data": ("training",),
    "Measuring": ("bench",),
    "The command line": ("cli",),
}


def messages(source: str) -> Iterator[str]:
    """The texts of the errors that a module raises, what is filled in shown as …, in the order of the code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = template(node.exc.args[0])
            if text is not None and any(letter.isalpha() for letter in text):
                yield text


def template(node: ast.expr) -> str | None:
    """A string's text, with … for what is filled in; None for what is put together elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
        return "".join(map(str, parts))
    return None


def by_room() -> dict[str, list[str]]:
    """All texts of the library under the heading of their room, each once."""
    found: dict[str, list[str]] = {}
    for heading, rooms in ROOMS.items():
        files = [file for room in rooms for file in _modules(ROOT / "hf_dart" / room)]
        texts = [text for file in files for text in messages(file.read_text(encoding="utf8"))]
        found[heading] = list(dict.fromkeys(texts))
    return found


def _modules(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.rglob("*.py"))
