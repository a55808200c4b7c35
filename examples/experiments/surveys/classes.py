"""Every class that transformers maps, against stock, for the tables of `tests/MATRIX.md`.

    PYTHONPATH=tests:examples/experiments python examples/experiments/surveys/classes.py FILE

A class is exact in a cell (attention, rows, mode, drafter), refused there in a sentence of ours, or stock itself fails
on text alone. Those that no small config of ours builds are told. Anything else is wrong tokens or a crash, of which
there may be none.
"""

from __future__ import annotations

import argparse
import json
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from support.compare import Run, parted, run
from support.tiny import ReplayDrafter, prompts
from surveys.small import NOT_BUILT, WORDS, CannotBuild, build, class_names, vocabulary_of

import hf_dart
from hf_dart import DartHead, LookupDrafter, TreeConfig, attach

TOKENS = 8
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "sampled": {"do_sample": True, "top_k": 0},
    "static": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
    "states": {"do_sample": False, "output_hidden_states": True, "return_dict_in_generate": True},
}
# Which drafters run in a mode: copies of the text, one that mostly knows, a random head.
DRAFTERS = {
    "greedy": ("copies", "known", "head"),
    "penalty": ("known",),
    "sampled": ("known", "head"),
    "static": ("known",),
    "states": ("known",),
}
# Attention, dtype, prompts, modes. Under eager attention stock itself gives NaN for padded rows in float64.
WAYS: list[tuple[str, torch.dtype, list[int], tuple[str, ...]]] = [
    ("eager", torch.float64, [7], ("greedy", "static", "states")),
    ("eager", torch.float32, [9, 4, 7], ("greedy", "sampled")),
    ("sdpa", torch.float64, [7], ("penalty", "sampled")),
    ("sdpa", torch.float64, [9, 4, 7], ("greedy", "penalty", "sampled", "static", "states")),
]


QUICK = [
    ("eager", torch.float64, [7], ("greedy",)),
    ("sdpa", torch.float64, [9, 4, 7], ("greedy", "static", "states")),
]


@dataclass
class Report:
    """What the cells of one class add up to."""

    name: str
    exact: int = 0
    near_ties: int = 0
    taus: list[float] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)
    stock_fails: dict[str, list[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    crashes: dict[str, list[str]] = field(default_factory=dict)

    @property
    def tau(self) -> float:
        """Mean of tokens per target forward, with a drafter that mostly knows."""
        return sum(self.taus) / max(len(self.taus), 1)

    @property
    def kind(self) -> str:
        """The first of these that holds."""
        if self.wrong or self.crashes:
            return "wrong" if self.wrong else "crash"
        if self.exact and self.refused:
            return "exact or refused"
        if self.exact or self.refused:
            return "exact" if self.exact else "refused"
        return "not built" if all(told.startswith(NOT_BUILT) for told in self.stock_fails) else "stock fails"


def sentence_of_ours(failure: Exception) -> str | None:
    """The sentence with which hf_dart refuses; None of other errors."""
    frames = traceback.extract_tb(failure.__traceback__)
    raised_here = Path(frames[-1].filename).is_relative_to(Path(hf_dart.__file__).parent)
    told = str(failure)
    return told if raised_here and isinstance(failure, ValueError) and told.endswith(".") else None


def examine(name: str, ways: list[tuple[str, torch.dtype, list[int], tuple[str, ...]]] = WAYS) -> Report:
    """Run every cell of a class."""
    report = Report(name)
    for attention, dtype, lengths, modes in ways:
        where = f"{attention}, {'padded' if len(lengths) > 1 else 'one row'}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _examine(report, where, attention, dtype, lengths, modes)
    return report


def _stock(name: str, attention: str, dtype: torch.dtype, inputs: Any, modes: tuple[str, ...]) -> tuple[Any, ...]:
    """A model, stock's run in every mode that it has, and the modes of every failure of the others."""
    stocks: dict[str, Run] = {}
    fails: dict[str, list[str]] = {}
    try:
        model = build(name, attention, dtype)
    except CannotBuild as reason:
        return None, stocks, {shortened(str(reason)): [""]}
    for mode in modes:
        try:
            stocks[mode] = run(model, inputs, 0, **MODES[mode], max_new_tokens=TOKENS)
        except Exception as failure:
            fails.setdefault(_short(failure), []).append(f", {mode}")
    return model, stocks, fails


def _examine(
    report: Report, where: str, attention: str, dtype: torch.dtype, lengths: list[int], modes: tuple[str, ...]
) -> None:
    inputs = prompts(lengths, vocabulary=WORDS)
    model, stocks, fails = _stock(report.name, attention, dtype, inputs, modes)
    if not stocks and dtype != torch.float32:  # some compute parts in float32 whatever their dtype
        dtype = torch.float32
        model, stocks, fails = _stock(report.name, attention, dtype, inputs, modes)
    for failure, there in fails.items():
        report.stock_fails.setdefault(failure, []).extend(f"{where}{mode}" for mode in there)
    if not stocks:
        return
    try:
        attach(model)
    except Exception as failure:
        _note(report, failure, where)
        return
    head = None
    try:
        head = DartHead.from_target(model, draft_length=5, initializer_range=0.3, tree={"nodes": 8})
    except Exception as failure:
        _note(report, failure, f"{where}, making a head")
    copies, pads = LookupDrafter(TreeConfig(nodes=8)), [max(lengths) - length for length in lengths]
    for mode, stock in stocks.items():
        options = {**MODES[mode], "max_new_tokens": TOKENS}
        known = ReplayDrafter(stock.sequences, pads, vocabulary_of(model), misses=[0.1, 0.5, 0.3][: len(lengths)])
        for which in DRAFTERS[mode]:
            drafter = {"copies": copies, "known": known, "head": head}[which]
            cell = f"{where}, {mode}, {which}"
            if drafter is None:
                continue
            try:
                ours = run(model, inputs, 0, assistant=drafter, **options)
            except Exception as failure:
                _note(report, failure, cell)
                continue
            _compare(report, cell, model, inputs, stock, ours, options)
            if which == "known":
                report.taus.append(drafter.last_stats.tau)


def _compare(report: Report, cell: str, model: Any, inputs: Any, stock: Run, ours: Run, options: Any) -> None:
    plain = {name: value for name, value in options.items() if not name.startswith(("output", "return"))}
    found = parted(model, inputs, 0, plain, stock, ours)
    if not found and not _same_states(stock.output, ours.output):
        report.wrong.append(f"{cell}: hidden states")
    elif all(one.near_tie for one in found) and (found or torch.equal(stock.state, ours.state)):
        report.exact += 1
        report.near_ties += bool(found)
    else:
        report.wrong.append(f"{cell}: {f'token {found[0].position}' if found else 'the generator'}")


def _same_states(stock: Any, ours: Any) -> bool:
    """Are the hidden states of all steps the same, if they were asked for?"""
    steps = [getattr(output, "hidden_states", None) or () for output in (stock, ours)]
    flat = [[states for step in its for states in step] for its in steps]
    return len(flat[0]) == len(flat[1]) and all(
        one.shape == two.shape and torch.allclose(one, two, rtol=1e-3, atol=1e-3 * float(one.abs().max()))
        for one, two in zip(*flat, strict=True)
    )


def _note(report: Report, failure: Exception, cell: str) -> None:
    told = sentence_of_ours(failure)
    if told is None:
        last = traceback.extract_tb(failure.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        report.crashes.setdefault(f"{_short(failure)} ({place})", []).append(cell)
    else:
        report.refused.setdefault(told, []).append(cell)


def _short(failure: Exception) -> str:
    return shortened(f"{type(failure).__name__}: {failure}")


def shortened(told: str) -> str:
    """One line of what an error says, without stock's plea to write to it."""
    return " ".join(told.split()).split(" Please request ")[0][:200]


def rows(reports: list[Report]) -> Iterator[str]:
    """Rows of the table."""
    for report in reports:
        others = [f"{_ways(cells)}: {told}" for told, cells in report.refused.items()]
        others += [
            told if told.startswith(NOT_BUILT) else f"{_FAILS}{_ways(cells)}): {told}"
            for told, cells in report.stock_fails.items()
        ]
        others += [f"**wrong**: {cell}" for cell in report.wrong]
        others += [f"**crash** ({_ways(cells)}): {told}" for told, cells in report.crashes.items()]
        told = "; ".join(" ".join(other.split())[:300].replace("|", "/") for other in others)
        yield f"| {report.name} | {report.exact} | {f'{report.tau:.2f}' if report.exact else ''} | {told} |"


def _ways(cells: list[str]) -> str:
    return " and ".join(dict.fromkeys(", ".join(cell.split(", ")[:2]) for cell in cells))


def _kind(row: str) -> str:
    """`Report.kind` of a row."""
    _, _, exact, _, told, _ = row.split("|")
    if "**" in told:
        return "wrong" if "**wrong**" in told else "crash"
    refused = re.search(r"(^|; )(eager|sdpa), (one row|padded)", told.strip())
    if int(exact):
        return "exact or refused" if refused else "exact"
    return "refused" if refused else "stock fails" if _FAILS in told else "not built"


def fill_in(page: Path, reports: list[Report]) -> None:
    """Put the rows into the table between the page's markers; those of other classes stay."""
    before, rest = page.read_text().split(_MARKERS[0])
    held, after = rest.split(_MARKERS[1])
    known = {row.split("|")[1]: row for row in [*held.split("|---|---|---|---|\n")[1].splitlines(), *rows(reports)]}
    kinds = Counter(map(_kind, known.values()))
    table = [
        f"{len(known)} classes: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) + ".",
        "",
        "| class | runs that equal stock's | τ | otherwise |",
        "|---|---|---|---|",
        *(known[name] for name in sorted(known)),
    ]
    page.write_text("\n".join([before + _MARKERS[0], *table, _MARKERS[1] + after]))


_FAILS = "stock fails ("
_MARKERS = ("<!-- classes -->", "<!-- /classes -->")


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kept", type=Path, help="a file of JSON lines, one per class; those that it has are not run")
    parser.add_argument("--quick", action="store_true", help="a few cells of each class")
    parser.add_argument("names", nargs="*", help="classes, whose rows are written; all by default")
    asked = parser.parse_intermixed_args()
    had = [Report(**json.loads(line)) for line in asked.kept.read_text().splitlines()] if asked.kept.exists() else []
    with asked.kept.open("a") as file:
        for name in asked.names or class_names():
            if name in {report.name for report in had}:
                continue
            had.append(examine(name, QUICK if asked.quick else WAYS))
            file.write(json.dumps(asdict(had[-1])) + "\n")
            file.flush()
    fill_in(Path(__file__).parents[3] / "tests" / "MATRIX.md", had)
