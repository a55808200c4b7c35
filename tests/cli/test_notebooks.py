"""The notebooks of `examples/notebooks` run, each in a fresh process, and show what is kept in them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FOLDER = TESTS.parent / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SHORT = ("1_quick_start",)


def run(file: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(FOLDER / "run.py"), str(file)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=() if file.stem in SHORT else pytest.mark.matrix, id=file.stem) for file in NOTEBOOKS],
)
def test_every_cell_shows_what_is_kept(file: Path, tmp_path: Path) -> None:
    if file.stem.endswith("trl"):
        pytest.importorskip("trl")
    done = run(file, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_is_a_whole_notebook(file: Path) -> None:
    text = file.read_text(encoding="utf8")
    notebook = json.loads(text)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["cells"][0]["cell_type"] == "markdown"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any(cell["outputs"] for cell in code)
    for cell in notebook["cells"]:
        for picture in re.findall(r"!\[.*?\]\((.*?)\)", "".join(cell["source"])):
            assert (FOLDER / picture).is_file()
    for cell in code:
        compile("".join(cell["source"]), file.name, "exec")
    assert str(Path.home()) not in text


def test_another_text_is_noticed(tmp_path: Path) -> None:
    file, cell = tmp_path / "one.ipynb", {"cell_type": "code", "id": "a", "source": ["print(2 + 3)"]}
    cases = [("5\n", [], True), ("6\n", [], False), ("6\n", ["varies"], True), ("six\n", ["varies"], False)]
    for kept, tags, right in cases:
        outputs = [{"output_type": "stream", "name": "stdout", "text": [kept]}]
        cells = [{**cell, "execution_count": 1, "outputs": outputs, "metadata": {"tags": tags}}]
        file.write_text(json.dumps({"cells": cells}), encoding="utf8")
        done = run(file, tmp_path)
        assert (done.returncode == 0) == right, done.stderr
