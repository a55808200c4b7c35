"""Runs the code of a notebook, cell by cell, as a notebook does, and compares what it shows with what is kept in it.

    python examples/notebooks/run.py FILE           fails where a text differs
    python examples/notebooks/run.py FILE --save    keeps what it shows

What a cell ends with is shown as text, and by `_repr_html_` if it has one. Of cells with the tag
"varies" (times), numbers are not compared; with the tag "machine" (training, hardware, versions) nothing is but that
there is a text.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of every code cell, in order."""
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, cell in enumerate(code_cells(notebook), start=1):
        tree = ast.parse("".join(cell["source"]), filename=f"cell {number}")
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, f"cell {number}", "exec"), names)
            shown = None
            if last is not None:
                shown = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
        found: list[dict[str, Any]] = []
        if printed.getvalue():
            found.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
        if shown is not None:
            kept = {"data": data(shown), "execution_count": number, "metadata": {}}
            found.append({**kept, "output_type": "execute_result"})
        outputs.append(found)
    return outputs


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def data(shown: Any) -> dict[str, Any]:
    """A value as a notebook keeps it; frames, which GitHub does not show, as their name alone."""
    if not hasattr(shown, "_repr_html_"):
        return {"text/plain": lines(repr(shown))}
    page = shown._repr_html_()
    kept = {"text/plain": [f"<{type(shown).__name__}>"]}
    if page.startswith("<svg"):  # a picture, which GitHub shows as such alone
        return {"image/svg+xml": lines(page), **kept}
    return kept if page.startswith("<iframe") else {"text/html": lines(page), **kept}


def texts(outputs: list[dict[str, Any]], tags: list[str]) -> list[str]:
    """What is compared of the outputs of a cell."""
    found = ["".join(one["text"] if "text" in one else one["data"]["text/plain"]) for one in outputs]
    if "machine" in tags:
        return ["a text" for text in found if text]
    return [_NUMBER.sub("#", text) for text in found] if "varies" in tags else found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    for kind in (DeprecationWarning, FutureWarning):
        warnings.simplefilter("error", kind)
    notebook = json.loads(arguments.file.read_text(encoding="utf8"))
    outputs = run(notebook)
    for number, (cell, found) in enumerate(zip(code_cells(notebook), outputs, strict=True), start=1):
        if arguments.save:
            cell |= {"outputs": found, "execution_count": number}
            continue
        tags = cell["metadata"].get("tags", [])
        got, kept = texts(found, tags), texts(cell["outputs"], tags)
        assert got == kept, f"cell {number} shows {got} instead of {kept}; run with --save if that is right"
    if arguments.save:
        arguments.file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
