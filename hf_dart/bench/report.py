"""What was measured, as JSON; `hf_dart.view.tables` shows it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from hf_dart.bench.pair import Pair
from hf_dart.bench.speed import Measurement, Settings, spread
from hf_dart.hub.machine import hardware, versions
from hf_dart.trees.config import TreeConfig
from hf_dart.view.tables import STOCK


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
