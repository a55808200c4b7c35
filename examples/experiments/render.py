"""Tables in Markdown files and the plots beside their JSON, made again from it.

python examples/experiments/render.py README.md docs/measured.md model_cards/demo_pair/README.md
"""

from __future__ import annotations

import argparse
import json
import operator
import re
from collections.abc import Callable, Sequence
from functools import partial
from math import log
from pathlib import Path
from statistics import geometric_mean, mean, stdev
from typing import Any

import drafts
import plots
import training_cost

from hf_dart.drafters.registry import registered
from hf_dart.hub import tables
from hf_dart.hub.card import has_markers, render_card
from hf_dart.hub.facts import HeadFacts
from hf_dart.hub.loading import PACKAGED_HEAD

BEGIN, END = "<!-- hf-dart table: {file} -->", "<!-- hf-dart table end -->"
"""What a table stands between; FILE is the JSON, seen from the folder of the Markdown file.

Of what `hf-dart bench` wrote, "FILE speed" leaves the times by phase out, "FILE summary" shows the ratios alone, and
"FILE means" their means over all texts. "FOLDER evidence" lists the JSON files of a folder of cards: when, where and by
which command each was made."""
_BEGINS = re.compile(r"<!-- hf-dart table: (\S+)(?: (speed|summary|means|evidence))? -->\n")
PLOTS = "plots"
"""A folder of that name beside the JSON holds its plots."""


def render_tables(markdown: str, folder: Path) -> str:
    """`markdown` with every table between `BEGIN` and `END` as its JSON has it.

    Args:
        folder: that paths are seen from.

    Raises:
        ValueError: a table has no end, or its file is not what a bench wrote.
    """
    done, rest = "", markdown
    while found := _BEGINS.search(rest):
        _, end, after = rest[found.end() :].partition(END)
        if not end:
            raise ValueError(f"The table of {found[1]} has no end; put {END!r} after it.")
        done += f"{rest[: found.end()]}\n{table(folder / found[1], found[2])}\n\n{END}"
        rest = after
    return done + rest


def table(file: Path, part: str | None = None) -> str:
    """The Markdown of what `hf-dart bench`, `training_cost.py` or `drafts.py` wrote with `--json`.

    Other scripts may leave their own table in their JSON, as "markdown".

    Args:
        part: of a bench: "speed" leaves the times by phase out, "summary" shows the ratios alone, "means" their means.

    Raises:
        ValueError: it is none of these.
    """
    if part == "evidence":
        return evidence(file)
    return _made(file, lambda content: _renderer(content, part)(content))


def evidence(cards: Path) -> str:
    """A Markdown table of the JSON files in a folder of cards: when, where and by which command each was made."""
    rows = []
    for file in sorted(cards.glob("*/*.json")):
        found = json.loads(file.read_text(encoding="utf8"))
        link = f"[{file.parent.name}/{file.name}](../{cards.name}/{file.parent.name}/README.md)"
        where = [found.get("hardware", ""), f"threads: {found['threads']}" if "threads" in found else ""]
        packages = [f"{name} {number}" for name, number in found.get("versions", {}).items()]
        command = f"`{found['command']}`" if "command" in found else "the card says it"
        known = [", ".join(filter(None, part)) or "not recorded" for part in (where, packages)]
        rows.append([link, found["date"], *known, command])
    return "\n".join(tables.markdown(["figures", "date", "hardware", "versions", "command"], rows))


def pictures(file: Path) -> dict[Path, str]:
    """The SVGs of what `hf-dart bench --json` wrote, by the file that each belongs into.

    Raises:
        ValueError: it is something else.
    """
    return {file.parent / PLOTS / f"{name}.svg": svg for name, svg in _made(file, plots.plots).items()}


def _made(file: Path, make: Callable[[dict[str, Any]], Any]) -> Any:
    try:
        content = json.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"Cannot read {file} ({error}); give what hf-dart bench --json wrote.") from error
    try:
        return make(content)
    except tables.UNREADABLE as error:
        raise ValueError(f"{file} is not what hf-dart bench --json writes ({error!r}); measure again.") from error


def _renderer(content: dict[str, Any], part: str | None) -> Callable[[dict[str, Any]], str]:
    if "markdown" in content:
        return operator.itemgetter("markdown")
    if "drafts" in content:
        return drafts.as_table
    if "blocks" in content["results"][0]:
        return training_cost.as_table
    return {"summary": summary, "means": means}.get(part or "", partial(tables.as_table, phases=part is None))


def summary(report: dict[str, Any]) -> str:
    """A Markdown table of the ratios alone: a row for every case, the text that repeats itself least first."""
    rows: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for one, case in zip(report["results"], tables.labels(report), strict=True):
        rows.setdefault((case, one["mode"], one["batch"]), {})[one["method"]] = one
    ordered = sorted(rows.items(), key=lambda row: (row[0][0], row[1][tables.STOCK]["repeated_4grams"]))
    methods = dict.fromkeys(one["method"] for one in report["results"] if one["method"] != tables.STOCK)
    cells = [
        [
            ", ".join(word for word in (case, mode, f"batch {batch}") if word),
            f"{by_method[tables.STOCK]['repeated_4grams']:.0%}",
            *(tables.ratio(by_method[name]["ratio"]) if name in by_method else "" for name in methods),
        ]
        for (case, mode, batch), by_method in ordered
    ]
    return "\n".join([tables.headline(report), "", *tables.markdown(["", "repeated 4-grams", *methods], cells)])


def means(report: dict[str, Any]) -> str:
    """A Markdown table of each method's mean ratio over all texts, and its least one, for each mode and batch.

    Of the methods beside copies alone, also the geometric mean of their speed in copies', its standard error, by which
    single rows of a few calls can be told apart from noise, and the least one.
    """
    ratios: dict[tuple[str, int], dict[str, list[float]]] = {}
    for one in report["results"]:
        if one["method"] != tables.STOCK:
            by_method = ratios.setdefault((one["mode"], one["batch"]), {})
            by_method.setdefault(one["method"], []).append(one["ratio"]["median"])
    methods = dict.fromkeys(name for by_method in ratios.values() for name in by_method)
    copies = next((name for name in methods if name.endswith("copies alone")), "")

    def cell(by_method: dict[str, list[float]], name: str) -> str:
        own, alone = by_method[name], by_method.get(copies, [])
        text = f"**{mean(own):.2f}** ({min(own):.2f})"
        if name == copies or len(alone) < 2:
            return text
        beside = [one / other for one, other in zip(own, alone, strict=True)]
        typical = geometric_mean(beside)
        error = typical * stdev(map(log, beside)) / len(beside) ** 0.5
        return f"{text}; {typical:.2f} ± {error:.2f} ({min(beside):.2f}) of copies"

    cells = [
        [f"{mode}, batch {batch}", *(cell(by_method, name) for name in methods)]
        for (mode, batch), by_method in ratios.items()
    ]
    return "\n".join(tables.markdown(["mean of x stock (least)", *methods], cells))


def render_file(file: Path, head: Path) -> bool:
    """Write the tables of a Markdown file again, a card's own part if it is one, and the plots of its tables.

    Plots are drawn where a folder for them lies beside the JSON (`PLOTS`).

    Args:
        head: the folder of the head that cards are about; their bench.json lies beside them.

    Returns:
        Whether anything has changed.

    Raises:
        ValueError: as `render_tables`; or the card's files are not those of that head.
        OSError: it cannot be read or written.
    """
    before = file.read_text(encoding="utf8")
    after = render_tables(before, file.parent)
    if has_markers(after):
        registered()  # so that cards of all kinds can be written
        after = render_card(HeadFacts.read(head, bench=file.parent / "bench.json"), after)
    texts = {file: after}
    for found in _BEGINS.finditer(after):
        if (file.parent / found[1]).with_name(PLOTS).is_dir():
            texts |= pictures(file.parent / found[1])
    changed = {path: text for path, text in texts.items() if not path.is_file() or path.read_text("utf8") != text}
    for path, text in changed.items():
        path.write_text(text, encoding="utf8")
    return bool(changed)


def main(words: Sequence[str] | None = None) -> None:
    """Write the files that are named again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="such as README.md, or a head's card")
    parser.add_argument("--head", type=Path, default=PACKAGED_HEAD, help="that cards are about (default: packaged)")
    arguments = parser.parse_args(words)
    for file in arguments.files:
        print(f"{file}: {'written again' if render_file(file, arguments.head) else 'as it was'}")


if __name__ == "__main__":
    main()
