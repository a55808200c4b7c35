"""Measures how the library's files hang together, and how large it is: `python examples/experiments/rooms.py`.

Every import counts, also those inside functions and under `TYPE_CHECKING`. `lint-imports` checks the order of rooms.
Lines and the suite are told with and without what was built on top of `generate` later (`LATER`):

    pytest -n auto --dist loadfile $(python examples/experiments/rooms.py --ignore)    without the tests of that
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A server, learning from what is written, a store across calls, grammars, drafters and files published since, packed
# weights, and checks of a machine; and what tests them, and drafts of long texts.
LATER = [
    *("hf_dart/serve", "hf_dart/learning", "hf_dart/decoding/suffix_store.py", "hf_dart/decoding/grammars.py"),
    *("hf_dart/drafters/gemma4", "hf_dart/interop/gemma4.py", "hf_dart/interop/mtp_module.py"),
    *("hf_dart/models/packed_weights.py", "hf_dart/bench/examining.py", "hf_dart/bench/serving.py"),
    *("hf_dart/cli/doctor.py", "hf_dart/cli/info.py", "hf_dart/cli/demo_learning.py", "hf_dart/hub/known_drafters.py"),
    *("tests/serve", "tests/learning", "tests/tools", "tests/real", "tests/typed", "tests/cli/test_serve.py"),
    *("tests/decoding/test_grammars.py", "tests/decoding/test_suffix_store.py", "tests/drafters/test_gemma4.py"),
    *("tests/bench/test_examining.py", "tests/bench/test_serving.py", "tests/models/test_packed_weights.py"),
    *("tests/drafters/test_draft_window.py", "tests/exact/test_draft_windows.py"),
    *("tests/hub/test_known_drafters.py", "tests/support/serving.py"),
]


def modules(package: Path) -> dict[str, Path]:
    """The files of a package by the name that imports them."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        if not (path.parent / "__init__.py").is_file():
            continue  # what is pushed with a drafter is no part of the package
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: Mapping[str, Path]) -> set[str]:
    """The modules among `known` that a file imports anywhere in its text."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            above = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            wanted = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for one in wanted:
            # What is imported from a module may be a module itself, or a name in it.
            while one and one not in known:
                one = one.rpartition(".")[0]
            found.add(one)
    return found - {"", name}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of modules that all reach each other, the largest first (strongly connected components, by Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(one: str) -> None:
        order[one] = low[one] = len(order)
        stack.append(one)
        for other in sorted(graph[one]):
            if other not in order:
                visit(other)
                low[one] = min(low[one], low[other])
            elif other in stack:
                low[one] = min(low[one], order[other])
        if low[one] == order[one]:
            circle = stack[stack.index(one) :]
            del stack[stack.index(one) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for one in graph:
        if one not in order:
            visit(one)
    return sorted(found, key=lambda circle: (-len(circle), circle))


def hidden(path: Path) -> int:
    """How many blocks of a file are read by type checkers alone."""
    tree = ast.parse(path.read_text(encoding="utf8"))
    return sum(isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) for node in ast.walk(tree))


def lines_of(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf8").splitlines()) for path in paths)


def earlier(folder: Path) -> list[Path]:
    """Files of a folder, without those of `LATER`."""
    later = [ROOT / one for one in LATER]
    return [path for path in folder.rglob("*.py") if not any(path.is_relative_to(one) for one in later)]


def by_folder(package: Path) -> str:
    """Lines of each folder of a package, the largest first."""
    folders = {path.name: lines_of(path.rglob("*.py")) for path in package.iterdir() if path.is_dir()}
    largest = sorted(folders.items(), key=lambda one: -one[1])
    return ", ".join(f"{name} {lines}" for name, lines in largest if lines)


def own_bases(kind: type) -> list[str]:
    """The names of a class's bases that stand in its own package."""
    package = kind.__module__.partition(".")[0]
    return [base.__name__ for base in kind.__mro__[1:] if base.__module__.partition(".")[0] == package]


def main(package: Path) -> int:
    known = modules(package)
    graph = {name: imports(name, path, known) for name, path in known.items()}
    found = circles(graph)
    for circle in found:
        print(f"circle of {len(circle)}: {', '.join(circle)}")
    entries = sorted(path.name for path in package.iterdir() if path.name != "__pycache__")
    print(f"circles: {len(found)}, of {sum(map(len, found))} files")
    print(f"TYPE_CHECKING blocks: {sum(map(hidden, known.values()))}")
    files = [*package.rglob("*.py")]  # with what is pushed beside a drafter
    print(f"files: {len(files)}, lines: {lines_of(files)} ({by_folder(package)})")
    print(f"top-level entries: {len(entries)} ({', '.join(entries)})")
    if package == ROOT / "hf_dart":
        from hf_dart import DartHead

        tests = ROOT / "tests"
        print(f"lines of tests: {lines_of(tests.rglob('*.py'))} ({by_folder(tests)})")
        print(f"without what came later: {lines_of(earlier(package))}, tests: {lines_of(earlier(tests))}")
        print(f"own bases of DartHead: {', '.join(own_bases(DartHead))}")
    return bool(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", type=Path, default=ROOT / "hf_dart", help="folder (default: hf_dart)")
    parser.add_argument("--ignore", action="store_true", help="print pytest's options that leave out later tests")
    arguments = parser.parse_args()
    if arguments.ignore:
        print(*(f"--ignore={one}" for one in LATER if one.startswith("tests/")))
    else:
        raise SystemExit(main(arguments.package))
