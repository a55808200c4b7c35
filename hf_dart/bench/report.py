"""Measurements as JSON: the one format of all reports; `hf_dart.view.tables` shows it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from hf_dart.bench.exact import repeated_4grams
from hf_dart.bench.pair import Pair
from hf_dart.bench.speed import Measurement
from hf_dart.hub.machine import hardware, versions
from hf_dart.trees.config import TreeConfig
from hf_dart.view.tables import STOCK


def circumstances(
    pair: Pair, settings: Any, text: str, command: Sequence[str], tree: TreeConfig | None = None
) -> dict[str, Any]:
    """All that a figure of a pair depends on: versions, hardware, dtype, threads, text, settings.

    Args:
        settings: a dataclass; with a `tree`, a `speed.Settings`.
        tree: drafted in all of the run, told with its number of nodes by batch size.
    """
    found = {
        "command": shlex.join(command),
        "versions": versions(),
        "hardware": hardware(pair.model.device),
        "device": pair.model.device.type,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": str(pair.model.dtype).removeprefix("torch."),
        "target": pair.target_name,
        "target_parameters": sum(p.numel() for p in pair.model.parameters()),
        "head": pair.head_name,
        "head_parameters": pair.head_parameters,
        "text": text,
        "settings": asdict(settings),
    }
    if tree is not None:
        nodes = {str(batch): tree.resolve_nodes(batch, pair.model.device.type) for batch in settings.batches}
        found |= {"tree": asdict(tree), "nodes": nodes}
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the largest of what repeats gave."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def results(measurements: list[Measurement], **case: Any) -> list[dict[str, Any]]:
    """One entry per measurement; ratios are to stock of the same mode, batch and repeat.

    Args:
        case: `text`, `dtype`, `prompt_tokens`: what these were measured on, since a report may have several.
    """
    stock = {(one.batch, one.mode): one for one in measurements if one.method == STOCK}
    return [{**case, **_result(one, stock[one.batch, one.mode])} for one in measurements]


def _result(one: Measurement, stock: Measurement) -> dict[str, Any]:
    result: dict[str, Any] = {
        "batch": one.batch,
        "mode": one.mode,
        "method": one.method,
        "ours": one.ours,
        "tokens": one.tokens,
        "seconds": one.seconds,
        "tokens_per_second": spread(one.speeds),
        "ratio": spread([ours / theirs for ours, theirs in zip(one.speeds, stock.speeds, strict=True)]),
        "repeated_4grams": repeated_4grams(one.written),
        "peak_memory_bytes": one.peak,
    }
    if one.verdict is not None:
        result |= {"identical": one.verdict.identical, "compared": asdict(one.verdict)}
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
