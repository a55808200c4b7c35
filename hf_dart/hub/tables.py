"""Tables of what `hf-dart bench` measured, in Markdown, from its JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

STOCK, OURS = "stock", "hf_dart"  # methods of a bench: `generate` as it is, and with the head
UNREADABLE = (KeyError, TypeError, IndexError, AttributeError, ValueError, ArithmeticError)
"""Errors of the writers of tables for JSON that is not what `hf-dart bench --json` writes."""
_DEPTHS = 8  # whose acceptance is shown


@dataclass(frozen=True)
class Verdict:
    """Comparison of two runs."""

    rows: int = 0
    near_ties: int = 0  # rows that part at one of stock's own choice
    differences: int = 0  # rows that part elsewhere
    generator: bool = True  # was left in the same state, in runs of which no row parts

    @property
    def identical(self) -> bool:
        """Token for token the same, near-ties apart, generator included."""
        return not self.differences and self.generator

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(
            self.rows + other.rows,
            self.near_ties + other.near_ties,
            self.differences + other.differences,
            self.generator and other.generator,
        )

    def __str__(self) -> str:
        if not self.identical:
            return "no"
        return f"yes, but for {self.near_ties} near-ties" if self.near_ties else "yes"


def labels(report: dict[str, Any]) -> list[str]:
    """Return the text that each result was measured on; empty where all have the same."""
    texts = [one.get("text") for one in report["results"]]
    return [text if len(set(texts)) > 1 else "" for text in texts]


def headline(about: dict[str, Any]) -> str:
    """Pair, dtype, hardware and versions on one line, and whether times are the thread's own, not wall time."""
    own = "'s processor time" * (about.get("clock") == "processor time")
    return (
        f"{about['target']} ({about['target_parameters'] / 1e6:.1f} M parameters), {about['head']} "
        f"({about['head_parameters'] / 1e6:.1f} M), {about['dtype']}, {about['hardware']}, "
        f"{about['threads']} thread{'s' * (about['threads'] != 1)}{own}; "
        + ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    )


def as_table(report: dict[str, Any], phases: bool = True) -> str:
    """Return the Markdown tables of a bench, with what it was measured on above: speed, and times by phase."""
    settings, entries = report["settings"], report["results"]
    several = any(labels(report))
    lines = [
        headline(report),
        f"{settings['prompts']} prompts of up to {settings['prompt_tokens']} tokens from {report['text']}, "
        f"{settings['new_tokens']} new tokens; median [min, max] of {settings['repeats']} interleaved "
        f"repeats{_framing(report)}",
        "",
        *_speeds(entries, several),
    ]
    drafted = [one for one in entries if "tau" in one]
    if drafted and phases:
        lines += ["", *_phases(drafted, several)]
    return "\n".join(lines)


def _framing(report: dict[str, Any]) -> str:
    """Template that the prompts were framed by, with its flags, for a headline."""
    flags = "".join(f", {name}={value}" for name, value in (report.get("template_flags") or {}).items())
    return f"; chat template {report['chat_template'][:8]}{flags}" if report.get("chat_template") else ""


def by_category(report: dict[str, Any]) -> str:
    """Markdown table of a drafter of ours on each text: acceptance by depth, and ratios to the other ways to be faster.

    The acceptance length has the bonus token; a depth's acceptance is the share of rounds that accepted so far.
    """
    rivals = {"stock prompt lookup": "x prompt lookup", f"{OURS}, copies alone": "x copies"}
    cases = {(one["text"], one["batch"], one["mode"], one["method"]): one for one in report["results"]}
    rows = []
    for (*case, method), one in cases.items():
        if method != OURS or "tau" not in one:
            continue
        depths = [count / one["row_rounds"] for count in one["accepted_per_depth"]]
        ours, others = one["ratio"]["median"], (cases.get((*case, rival)) for rival in rivals)
        ratios = ["" if other is None else f"{ours / other['ratio']['median']:.2f}" for other in others]
        rows.append([
            *map(str, case), str(one.get("prompts", "")), f"{one['tau']:.2f}",
            " ".join(f"{share:.2f}" for share in depths[:_DEPTHS]) + " ..." * (len(depths) > _DEPTHS),
            f"{ours:.2f}", *ratios, f"{one['repeated_4grams']:.0%}",
        ])  # fmt: skip
    names = ["text", "batch", "mode", "prompts", "acceptance length", "by depth", "x stock", *rivals.values()]
    return "\n".join(markdown([*names, "repeated 4-grams"], rows))


def compared(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Markdown of two reports side by side, their circumstances above: what both have measured, by the same names."""
    keys = ("text", "batch", "mode", "method")
    earlier, later = ({tuple(one[key] for key in keys): one for one in report["results"]} for report in (before, after))
    rows = []
    for key in (key for key in earlier if key in later):
        one, two = earlier[key], later[key]
        figures = [(one["ratio"]["median"], two["ratio"]["median"]), (one.get("tau"), two.get("tau"))]
        shown = [f"{old:.2f} → {new:.2f}" if old and new else "" for old, new in figures]
        repeated = f"{one['repeated_4grams']:.0%} → {two['repeated_4grams']:.0%}"
        rows.append([*map(str, key), *shown, f"{figures[0][1] / figures[0][0] - 1:+.0%}", repeated])
    alone = f"rows that only one of them has: {len(earlier) + len(later) - 2 * len(rows)}"
    old, new = ({**report["settings"], "template": _framing(report)} for report in (before, after))
    other = [f"{name} {old[name]} → {new.get(name)}" for name in old if old[name] != new.get(name)]
    told = [f"not measured alike: {', '.join(other)}", ""] if other else []
    table = markdown([*keys, "x stock", "τ", "change", "repeated 4-grams"], rows)
    return "\n".join([headline(before), headline(after), "", *told, *table, "", alone])


def markdown(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table: its columns' names, then each row's cells."""
    head, *body = (" | ".join(cell.replace("|", r"\|") for cell in cells) for cells in (names, *rows))
    return [f"| {head} |", "|---" * len(names) + "|", *(f"| {line} |" for line in body)]


def aligned(text: str) -> str:
    """Text for a terminal: the columns of Markdown tables padded to one width, and marks of Markdown left out."""
    plain = text.replace("**", "").replace("`", "").splitlines()
    lines: list[str] = []
    for is_table, group in groupby(plain, key=lambda line: line.startswith("|")):
        if not is_table:
            lines += group
            continue
        rows = [[one.strip().replace(r"\|", "|") for one in re.split(r"(?<!\\)\|", line.strip("|"))] for line in group]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return "\n".join(lines)


def ratio(spread: dict[str, float]) -> str:
    """Return the cell of a ratio: its median, and the least and the largest one."""
    return f"**{spread['median']:.2f}** [{spread['min']:.2f}, {spread['max']:.2f}]"


def _speeds(entries: list[dict[str, Any]], several: bool) -> list[str]:
    names = ["batch", "mode", "method", "tokens/s", "x stock", "τ", "accepted", "identical", "repeated 4-grams"]
    rows = []
    for one in entries:
        stock = one["method"] == STOCK
        same = "other numbers" if not stock and "compared" not in one else ""
        rows.append([
            str(one["batch"]), one["mode"], one["method"], f"{one['tokens_per_second']['median']:.0f}",
            "1" if stock else ratio(one["ratio"]),
            *((f"{one['tau']:.2f}", f"{one['acceptance_rate']:.0%}") if "tau" in one else ("", "")),
            str(Verdict(**one["compared"])) if "compared" in one else same, f"{one['repeated_4grams']:.0%}",
            f"{one['peak_memory_bytes'] / 2**20:.0f}" if one["peak_memory_bytes"] else "",
        ])  # fmt: skip
    lines = _by_case([*names, "peak MiB"], rows, entries, several)
    if any("compared" not in one and one["method"] != STOCK for one in entries):
        lines += ["", "`other numbers`: stock's assisted sampling draws from the generator in another order."]
    return lines


def _phases(drafted: list[dict[str, Any]], several: bool) -> list[str]:
    methods = len({one["method"] for one in drafted}) > 1
    phases = list(dict.fromkeys(phase for one in drafted for phase in one["round_ms"]))
    names = ["batch", "mode", *(["method"] if methods else []), *(f"{phase} ms" for phase in phases), "not a forward"]
    rows = []
    for one in drafted:
        times = (one["round_ms"].get(phase) for phase in phases)
        rows.append([
            str(one["batch"]), one["mode"], *([one["method"]] if methods else []),
            *(f"{ms:.2f}" if ms else "" for ms in times),
            "" if one["not_forward"] is None else f"{one['not_forward']:.0%}",
        ])  # fmt: skip
    about = (
        "Milliseconds per round. `rest` is time in `generate` outside all phases: the loop itself and "
        "what transformers prepares. `not a forward`: all but draft and verify, over the round."
    )
    return [*_by_case(names, rows, drafted, several), "", about]


def _by_case(names: list[str], rows: list[list[str]], entries: list[dict[str, Any]], several: bool) -> list[str]:
    """Return the table of some entries, with a first column for the text of each where there are several."""
    if not several:
        return markdown(names, rows)
    return markdown(["case", *names], [[one["text"], *row] for one, row in zip(entries, rows, strict=True)])
