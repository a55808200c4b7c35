"""Runs the code of a notebook, cell by cell, as a notebook does: `python tests/support/run_notebook.py FILE`.

What a cell ends with is shown: by `_repr_html_` if it has one, which has to be HTML.
"""

from __future__ import annotations

import ast
import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import pages


def run(notebook: dict[str, Any]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"], start=1):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]), filename=f"cell {number}")
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec"), names)
        if last is None:
            continue
        shown = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
        if hasattr(shown, "_repr_html_"):
            assert pages.read(shown._repr_html_()).parts
            print(f"[{type(shown).__name__}]")
        elif shown is not None:
            print(repr(shown))


if __name__ == "__main__":
    for kind in (DeprecationWarning, FutureWarning):
        warnings.simplefilter("error", kind)
    run(json.loads(Path(sys.argv[1]).read_text(encoding="utf8")))
