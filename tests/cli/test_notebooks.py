"""The notebooks of `examples/notebooks` run, each in a fresh process, and are stored without outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FOLDER = TESTS.parent / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SHORT = ("1_quick_start",)


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=() if file.stem in SHORT else pytest.mark.matrix, id=file.stem) for file in NOTEBOOKS],
)
def test_every_cell_runs(file: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(TESTS / "support" / "run_notebook.py"), str(file)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_is_a_notebook_without_outputs(file: Path) -> None:
    notebook = json.loads(file.read_text(encoding="utf8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["cells"][0]["cell_type"] == "markdown"
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        assert cell["source"]
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            compile("".join(cell["source"]), file.name, "exec")
