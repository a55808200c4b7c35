"""What `examples/experiments/rooms.py` counts: every import, wherever it stands; and what test files import."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rooms import LATER, ROOT, circles, earlier, hidden, imports, modules

FILES = {
    "__init__.py": "",
    "low.py": "def f():\n    from house import high\n",
    "middle/__init__.py": "from house.middle.one import x\n",
    "middle/one.py": "import house.low\nfrom .two import y\n",
    "middle/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.middle import one\n",
    "high.py": "from house.middle import x, one\n",
}


@pytest.fixture
def graph(tmp_path: Path) -> dict[str, set[str]]:
    for name, text in FILES.items():
        file = tmp_path / "house" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    known = modules(tmp_path / "house")
    return {name: imports(name, path, known) for name, path in known.items()}


def test_imports_are_seen_wherever_they_stand(graph: dict[str, set[str]]) -> None:
    assert graph == {
        "house": set(),
        "house.low": {"house.high"},
        "house.middle": {"house.middle.one"},
        "house.middle.one": {"house.low", "house.middle.two"},
        "house.middle.two": {"house.middle.one"},
        "house.high": {"house.middle", "house.middle.one"},
    }


def test_circles(graph: dict[str, set[str]]) -> None:
    assert circles(graph) == [sorted(set(graph) - {"house"})]
    graph["house.low"] = {"house"}
    assert circles(graph) == [["house.middle.one", "house.middle.two"]]


def test_blocks_for_type_checkers(graph: dict[str, set[str]], tmp_path: Path) -> None:
    found = {path.name: hidden(path) for path in (tmp_path / "house").rglob("*.py")}
    assert found == {**dict.fromkeys(found, 0), "two.py": 1}


def test_no_test_file_imports_another() -> None:
    """What several of them need is in `support/`, so that each runs by itself."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 100
    importing = re.compile(r"^\s*(from|import) ([\w.]+\.)?test_", re.MULTILINE)
    assert [str(path) for path in files if importing.search(path.read_text())] == []


def test_what_came_later_is_there() -> None:
    assert [one for one in LATER if not (ROOT / one).exists()] == []
    files = earlier(ROOT / "hf_dart")
    assert ROOT / "hf_dart" / "decoding" / "walk.py" in files
    assert not any("serve" in path.parts or path.stem == "grammars" for path in files)
