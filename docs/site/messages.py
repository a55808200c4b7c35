"""Every error text of the library, read from its code: what docs/troubleshooting.md has to list.

python docs/site/messages.py    # writes the list into that page again
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
MARKERS = "<!-- messages -->\n", "<!-- /messages -->\n"

# Errors of the house: a user meets none of them.
_UNTOLD = {"AttributeError", "NotImplementedError", "argparse.ArgumentTypeError"}
# A heading for each room, in the order of the page.
ROOMS = {
    "Calls of generate": ("decoding", "errors.py"),
    "Targets": ("models", "cache"),
    "Drafters, heads and adapters": ("drafters",),
    "Many requests at once": ("serve",),
    "Learning": ("learning",),
    "Compiled rounds": ("engine",),
    "Trees and n-gram tables": ("trees",),
    "Files of other projects": ("interop",),
    "The Hub and cards": ("hub",),
    "Training and data": ("training",),
    "Measuring": ("bench",),
    "The command line": ("cli",),
}


def messages(source: str) -> Iterator[str]:
    """Yield the errors that a module raises, returns or warns of, with … for what is filled in; whole sentences alone.

    What is shorter is put into another sentence, or never meets a user.
    """
    for node in ast.walk(ast.parse(source)):
        said = None
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) not in _UNTOLD:
            said = template(node.exc.args[0]) if node.exc.args else None
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
            said = template(node.args[0])
        elif isinstance(node, ast.Return) and node.value is not None and source.startswith('"""Errors of the Hub'):
            said = template(node.value)
        if said is not None and said.rstrip("…").endswith((".", "?", "; ", ": ")) and said.count(" ") > 2:
            yield said


def template(node: ast.expr) -> str | None:
    """Return a string's text, with … for what is filled in; None for what is put together elsewhere."""
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


def listed() -> str:
    """Return the list as Markdown."""
    parts = [f"### {heading}\n\n" + "".join(map(_line, texts)) for heading, texts in by_room().items()]
    return "\n" + "\n".join(parts) + "\n"


def with_list(page: str) -> str:
    """Return the page with the list as it is now between its markers."""
    before, _, rest = page.partition(MARKERS[0])
    return before + MARKERS[0] + listed() + MARKERS[1] + rest.partition(MARKERS[1])[2]


def _line(text: str) -> str:
    for sign in "\\*<|":  # of Markdown
        text = text.replace(sign, f"\\{sign}")
    return f"- {text}\n"


def _modules(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


if __name__ == "__main__":
    PAGE.write_text(with_list(PAGE.read_text(encoding="utf8")), encoding="utf8")
