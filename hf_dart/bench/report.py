"""What was measured, as a table and as JSON."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from hf_dart.bench.exact import Verdict
from hf_dart.bench.pair import Pair
from hf_dart.bench.rivals import STOCK
from hf_dart.bench.speed import Measurement, Settings, spread
from hf_dart.configuration import TreeConfig
from hf_dart.hub.machine import hardware, versions

UNREADABLE = (KeyError, TypeError, IndexError, AttributeError, ValueError, ArithmeticError)
"""What the writers of tables raise for JSON that is not what `as_json` gives."""


def circumstances(
    pair: Pair, settings: Settings, tree: TreeConfig, text: str, command: Sequence[str]
) -> dict[str, Any]:
    """All that a figure depends on: versions, hardware, dtype, threads, text, settings."""
    device = pair.model.device
    return {
        "command": shlex.join(command),
        "versions": versions(),
        "hardware": hardware(device),
        "device": device.type,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": str(pair.model.dtype).removeprefix("torch."),
        "target": pair.target_name,
        "target_parameters": sum(p.numel() for p in pair.model.parameters()),
        "head": pair.head_name,
        "head_parameters": sum(p.numel() for p in pair.head.parameters()),
        "text": text,
        "settings": asdict(settings),
        "tree": asdict(tree),
        "nodes": {str(batch): tree.resolve_nodes(batch, device.type) for batch in settings.batches},
    }


def as_json(measurements: list[Measurement], about: dict[str, Any]) -> dict[str, Any]:
    """Everything, ready for `json.dump`; ratios are to stock of the same mode, batch and repeat."""
    return {**about, "results": results(measurements)}


def results(measurements: list[Measurement], **case: Any) -> list[dict[str, Any]]:
    """One entry per measurement.

    Args:
        case: `text`, `dtype`, `prompt_tokens`: what these were measured on, since a report may have several.
    """
    return [{**case, **_result(one, _stock_of(one, measurements))} for one in measurements]


def labels(report: dict[str, Any]) -> list[str]:
    """Of each result, what of its case is not the same in all of them; empty in reports of one case."""
    entries = report["results"]
    varying = [name for name in ("text", "dtype") if len({one.get(name) for one in entries}) > 1]
    lengths = {(one.get("text"), one.get("prompt_tokens")) for one in entries}
    if len(lengths) > len({text for text, _ in lengths}):
        varying.append("prompt_tokens")
    units = {"prompt_tokens": " tokens"}
    return [", ".join(f"{one[name]}{units.get(name, '')}" for name in varying) for one in entries]


def _stock_of(one: Measurement, measurements: list[Measurement]) -> Measurement:
    wanted = (one.batch, one.mode, STOCK)
    return next(other for other in measurements if (other.batch, other.mode, other.method) == wanted)


def _result(one: Measurement, stock: Measurement) -> dict[str, Any]:
    result: dict[str, Any] = {
        "batch": one.batch,
        "mode": one.mode,
        "method": one.method,
        "ours": one.ours,
        "tokens": one.tokens,
        "seconds": one.seconds,
        "tokens_per_second": _spread(one.speeds),
        "ratio": _spread(one.ratios(stock)),
        "repeated_4grams": one.repeated,
        "peak_memory_bytes": one.peak,
    }
    verdict = one.verdict
    if verdict is not None:
        result["identical"] = verdict.identical
        result["compared"] = {
            "rows": verdict.rows,
            "near_ties": verdict.near_ties,
            "differences": verdict.differences,
            "generator": verdict.generator,
        }
    if one.stats.rounds:
        result |= {
            "rounds": one.stats.rounds,
            "row_rounds": one.stats.row_rounds,
            "tau": one.stats.tau,
            "acceptance_rate": one.stats.acceptance_rate,
            "accepted_per_depth": one.stats.accepted_per_depth,
            "prefill_seconds": one.stats.seconds["prefill"],
            "round_ms": one.round_ms,
            "not_forward": one.not_forward,
        }
    return result


def _spread(values: list[float]) -> dict[str, float]:
    return dict(zip(("median", "min", "max"), spread(values), strict=True))


def headline(about: dict[str, Any]) -> str:
    """Pair, dtype, hardware and versions on one line."""
    return (
        f"{about['target']} ({about['target_parameters'] / 1e6:.1f} M parameters), {about['head']} "
        f"({about['head_parameters'] / 1e6:.1f} M), {about['dtype']}, {about['hardware']}, "
        f"{about['threads']} threads; " + ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    )


def as_table(report: dict[str, Any], phases: bool = True) -> str:
    """Markdown tables of what `as_json` gives, what they were measured on above: speed, and times by phase."""
    settings, entries = report["settings"], report["results"]
    cases = labels(report)
    lines = [
        headline(report),
        f"{settings['prompts']} prompts of up to {settings['prompt_tokens']} tokens from {report['text']}, "
        f"{settings['new_tokens']} new tokens; median [min, max] of {settings['repeats']} interleaved "
        "repeats",
        "",
        *_speeds(entries, cases),
    ]
    drafted = [(one, case) for one, case in zip(entries, cases, strict=True) if "tau" in one]
    if drafted and phases:
        lines += ["", *_phases(drafted)]
    return "\n".join(lines)


def _speeds(entries: list[dict[str, Any]], cases: list[str]) -> list[str]:
    names = ["batch", "mode", "method", "tokens/s", "x stock", "τ", "accepted", "identical", "repeated 4-grams"]
    lines = _head([*_case_column(cases), *names, "peak MiB"])
    for one, case in zip(entries, cases, strict=True):
        stock, ratio = one["method"] == STOCK, one["ratio"]
        same = "other numbers" if not stock and "compared" not in one else ""
        cells = [
            *([case] if any(cases) else []),
            str(one["batch"]),
            one["mode"],
            one["method"],
            f"{one['tokens_per_second']['median']:.0f}",
            "1" if stock else f"**{ratio['median']:.2f}** [{ratio['min']:.2f}, {ratio['max']:.2f}]",
            *((f"{one['tau']:.2f}", f"{one['acceptance_rate']:.0%}") if "tau" in one else ("", "")),
            str(Verdict(**one["compared"])) if "compared" in one else same,
            f"{one['repeated_4grams']:.0%}",
            f"{one['peak_memory_bytes'] / 2**20:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if any("compared" not in one and one["method"] != STOCK for one in entries):
        lines += ["", "`other numbers`: stock's assisted sampling draws from the generator in another order."]
    return lines


def _phases(drafted: list[tuple[dict[str, Any], str]]) -> list[str]:
    cases = [case for _, case in drafted]
    several = len({one["method"] for one, _ in drafted}) > 1
    phases = list(drafted[0][0]["round_ms"])
    names = ["batch", "mode", *(["method"] if several else []), *(f"{phase} ms" for phase in phases), "not a forward"]
    lines = _head([*_case_column(cases), *names])
    for one, case in drafted:
        cells = [*([case] if any(cases) else []), str(one["batch"]), one["mode"], *([one["method"]] if several else [])]
        cells += [f"{value:.2f}" for value in one["round_ms"].values()]
        lines.append(f"| {' | '.join([*cells, format(one['not_forward'], '.0%')])} |")
    return [
        *lines,
        "",
        "Milliseconds per round. `rest` is time in `generate` outside all phases: the loop itself and "
        "what transformers prepares. `not a forward`: all but draft and verify, over the round.",
    ]


def _case_column(cases: list[str]) -> list[str]:
    return ["case"] if any(cases) else []


def _head(names: list[str]) -> list[str]:
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
