"""Mutation testing: put subtle bugs into a module one at a time, and run its tests on each.

    python examples/experiments/mutation.py --sample 40 --seed 0
    python examples/experiments/mutation.py --listed   # the bugs of tests/mutants.toml, each on the tests that guard it

In a copy of the repository, so that the working tree stays as it is. Survivors are printed with their lines, and at the
end the share that was noticed: by a test that fails, or by a run that takes more than three times as much processor
time as without a bug. A survivor is worth a test or, where it changes nothing that anyone can see, simpler code.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import os
import random
import resource
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LISTED = ROOT / "tests" / "mutants.toml"
_PARTS = ["engine/test_tier.py", "engine/test_engine.py", "engine/test_fixed_states.py"]
_CACHES = ["cache/test_tree_caches.py", "decoding/test_turns.py", "decoding/test_interruption.py"]
_WALKS = ["decoding/test_walk.py", "decoding/test_rows.py"]
_EXACT = ["exact/test_exact.py", "exact/test_options.py"]
# The tests of each module's room, the quick ones first.
ROOMS = {
    "decoding/walk.py": [*_WALKS, *_EXACT, "decoding/test_interruption.py"],
    "decoding/rows.py": [*_WALKS, *_EXACT, "decoding/test_interruption.py"],
    "models/verify.py": [*_EXACT, "cache/test_tree_caches.py", "models/test_trial.py"],
    "cache/slot_cache.py": [*_CACHES, "exact/test_options.py", "engine/test_tier.py"],
    "cache/target_cache.py": [*_CACHES, *_PARTS, "models/test_running_states.py"],
    "engine/tier.py": _PARTS,
    "decoding/seats.py": ["decoding/test_seats.py", "serve/test_batcher.py"],
    "serve/batcher.py": ["serve/test_batcher.py"],
    "serve/prefixes.py": ["serve/test_prefixes.py", "serve/test_batcher.py"],
    "decoding/suffix_store.py": ["decoding/test_suffix_store.py"],
    "trees/on_host.py": ["trees/test_growers.py", "trees/test_ngram_scores.py", "trees/test_costs.py"],
    "trees/copies.py": ["trees/test_copies.py", "decoding/test_suffix_store.py"],
    "learning/ring.py": ["learning/test_learner.py"],
}


def _swapped(*pairs: tuple[Any, Any]) -> dict[Any, Any]:
    return {one: other for pair in pairs for one, other in (pair, pair[::-1])}


COMPARISONS = _swapped(
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)
)
OPERATORS = _swapped((ast.Add, ast.Sub), (ast.BitAnd, ast.BitOr)) | {ast.Mult: ast.Add}
NAMES = _swapped(
    ("min", "max"), ("minimum", "maximum"), ("amin", "amax"), ("any", "all"), ("argmax", "argmin"),
    ("zeros", "ones"), ("zeros_like", "ones_like"),
)  # fmt: skip


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """What could stand in a node's place."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            swapped = [*node.ops]
            swapped[place] = COMPARISONS[type(operator)]()
            yield ast.Compare(node.left, swapped, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert)):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
        yield ast.Call(ast.Name(NAMES[node.func.id]), node.args, node.keywords)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        attribute = node.func
        if attribute.attr in NAMES:
            yield ast.Call(ast.Attribute(attribute.value, NAMES[attribute.attr]), node.args, node.keywords)
        for word in node.keywords:
            if attribute.attr == "clamp":
                others = [one for one in node.keywords if one is not word]
                yield ast.Call(attribute, node.args, others) if others else attribute.value
    elif isinstance(node, (ast.AugAssign, ast.Raise)) or (
        isinstance(node, ast.Expr) and not isinstance(node.value, (ast.Constant, ast.Yield, ast.YieldFrom))
    ):
        yield ast.Pass()


def nodes_of(tree: ast.AST) -> Iterator[ast.AST]:
    """Those that run when the module is used: no annotations, sentences, decorators and assertions."""
    for name, value in ast.iter_fields(tree):
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            continue
        if name in ("annotation", "returns", "decorator_list") or isinstance(tree, (ast.Assert, ast.JoinedStr)):
            continue
        for child in value if isinstance(value, list) else [value]:
            number = isinstance(child, (ast.Constant, ast.UnaryOp))
            if number and name == "args" and isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute):
                continue  # a dimension: another one is another shape, which any test notices
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.AST):
                yield child
                yield from nodes_of(child)


def mutants(source: str) -> Iterator[str]:
    """The module with one bug each."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    whole = source.encode()
    for node in nodes_of(ast.parse(source)):
        if not hasattr(node, "end_col_offset"):
            continue
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        for variant in variants(node):
            text = ast.unparse(ast.fix_missing_locations(variant))
            if isinstance(variant, ast.expr) and not isinstance(variant, ast.Constant):
                text = f"({text})"
            changed = (whole[:begin] + text.encode() + whole[end:]).decode()
            ast.parse(changed)
            yield changed


def told(module: str, source: str, mutant: str) -> str:
    """What was changed, as a diff of its lines."""
    changes = difflib.unified_diff(source.splitlines(), mutant.splitlines(), n=0, lineterm="")
    header, *lines = list(changes)[2:]
    return "\n".join([f"hf_dart/{module}:{header.split()[1].lstrip('-').split(',')[0]}", *lines])


def noticed(copy: Path, tests: list[str], limit: float | None = None) -> bool:
    """Return whether a test fails, or takes more than so many seconds of processor time.

    In a fork of this process, which has imported what takes long, and nothing of the library.
    """
    process = os.fork()
    if process == 0:
        if limit is not None:  # of the processor, which a busy machine does not run out of sooner
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"], sys.dont_write_bytecode = str(copy), True
        os._exit(int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *(f"tests/{one}" for one in tests)])))
    return os.waitpid(process, 0)[1] != 0


@contextmanager
def changed(place: Path, text: str) -> Iterator[None]:
    """Give a file of the copy another text meanwhile."""
    before = place.read_text()
    place.write_text(text)
    yield
    place.write_text(before)


def copy_of_the_repository(folder: Path) -> Path:
    """Copy the library and its tests to `folder`, where bugs may be put into them."""
    for part in ("hf_dart", "tests", "examples/experiments"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_listed(names: list[str]) -> None:
    """Put each bug of `tests/mutants.toml` into a copy, and run the tests that guard it.

    Exits with an error if the outcome of one is another than its field `seen` says.
    """
    listed = tomllib.loads(LISTED.read_text())["mutant"]
    chosen = [one for one in listed if not names or one["name"] in names]
    if unknown := set(names) - {one["name"] for one in listed}:
        sys.exit(f"{LISTED.name} has no {', '.join(sorted(unknown))}.")
    seen, wrong = 0, []
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_the_repository(Path(folder))
        for one in chosen:
            place = copy / one["file"]
            source = place.read_text()
            if source.count(one["old"]) != 1:
                sys.exit(f"{one['name']}: {one['file']} has its `old` text {source.count(one['old'])} times, not once.")
            with changed(place, source.replace(one["old"], one["new"])):
                found = noticed(copy, one["tests"], limit=600)
            seen += found
            if found != one.get("seen", True):
                wrong.append(one["name"])
            print(f"{one['name']}: {'seen' if found else 'not seen'}", flush=True)
    print(f"{seen} of {len(chosen)} listed bugs were seen.")
    if wrong:
        sys.exit(f"Another outcome than listed: {', '.join(wrong)}.")


def run_drawn(modules: list[str], count: int | None, seed: int) -> None:
    """Put bugs drawn at random into modules, and run the tests of their rooms."""
    sources = {module: (ROOT / "hf_dart" / module).read_text() for module in modules}
    chosen = [(module, mutant) for module, source in sources.items() for mutant in mutants(source)]
    random.Random(seed).shuffle(chosen)
    chosen, seen = chosen[:count], 0
    limits: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_the_repository(Path(folder))
        for module, mutant in chosen:
            if module not in limits:
                began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
                if noticed(copy, ROOMS[module]):
                    sys.exit(f"The tests of {module} fail without a bug.")
                limits[module] = 3 * (resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began) + 60
            with changed(copy / "hf_dart" / module, mutant):
                found = noticed(copy, ROOMS[module], limits[module])
            seen += found
            if not found:
                print(told(module, sources[module], mutant), flush=True)
    print(f"{seen} of {len(chosen)} bugs were noticed.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(ROOMS)}; all by default")
    parser.add_argument("--sample", type=int, help="so many of all bugs, drawn at random; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--listed", nargs="*", metavar="NAME", help="those of tests/mutants.toml, or some by name")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in ("torch", "peft", "transformers.generation", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)  # once for all tests
    if given.listed is not None:
        run_listed(given.listed)
    else:
        run_drawn(given.modules or list(ROOMS), given.sample, given.seed)


if __name__ == "__main__":
    main()
