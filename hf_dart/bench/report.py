"""Measurements as JSON: the one format of all reports; `hf_dart.hub.tables` shows it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from hf_dart.bench.exact import one_thread, repeated_4grams
from hf_dart.bench.pair import Pair, thinking_of
from hf_dart.bench.speed import Measurement
from hf_dart.hub import machine
from hf_dart.hub.tables import STOCK
from hf_dart.models.tokenizers import template_hash


def circumstances(pair: Pair, settings: Any, text: str, command: Sequence[str]) -> dict[str, Any]:
    """All that a figure of a pair depends on: versions, hardware, dtype, template, text, settings, the head's trees."""
    template = getattr(pair.tokenizer, "chat_template", None)
    return {
        **machine.circumstances(command, pair.model.device),
        "device": pair.model.device.type,
        "clock": "processor time" if one_thread(pair.model.device) else "wall time",
        "cores": os.cpu_count(),
        "dtype": str(pair.model.dtype).removeprefix("torch."),
        "target": pair.target_name,
        "target_parameters": sum(p.numel() for p in pair.model.parameters()),
        "head": pair.head_name,
        "head_parameters": pair.added_parameters(pair.head),
        "chat_template": template_hash(template) if isinstance(template, str) else None,
        "template_flags": thinking_of(pair),
        "text": text,
        "settings": asdict(settings),
        "tree": asdict(pair.head.tree_config),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the largest of what repeats gave."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def results(measurements: list[Measurement], **case: Any) -> list[dict[str, Any]]:
    """One entry per measurement of a `case` (`text`, `dtype`, `prompt_tokens`); ratios are to stock's repeats."""
    stock = {(one.batch, one.mode): one for one in measurements if one.method == STOCK}
    return [{**case, **_result(one, stock[one.batch, one.mode])} for one in measurements]


def _result(one: Measurement, stock: Measurement) -> dict[str, Any]:
    written, stats, phases = one.written, one.stats, one.phases
    speeds = _speeds(one)
    result: dict[str, Any] = {
        "batch": one.batch,
        "mode": one.mode,
        "method": one.method,
        "ours": one.ours,
        "tokens": sum(map(len, written)),
        "seconds": one.seconds,
        "tokens_per_second": spread(speeds),
        "ratio": spread([ours / theirs for ours, theirs in zip(speeds, _speeds(stock), strict=True)]),
        "repeated_4grams": repeated_4grams(written),
        "peak_memory_bytes": one.peak,
    }
    if one.compared:
        result |= {"identical": one.verdict.identical, "compared": asdict(one.verdict)}
    if stats.rounds:
        spent = {name: seconds for name, seconds in phases.items() if name != "prefill"}
        # The loop's own time, and what transformers prepares before it.
        spent["rest"] = sum(one.seconds) - sum(phases.values())
        result |= {
            "rounds": stats.rounds,
            "row_rounds": stats.row_rounds,
            "tau": stats.tau,
            "acceptance_rate": stats.acceptance_rate,
            "accepted_per_depth": stats.accepted_per_depth,
            "prefill_seconds": phases["prefill"],
            "round_ms": {name: 1000 * seconds / stats.rounds for name, seconds in spent.items()},
            "not_forward": 1 - (spent["draft"] + spent["verify"]) / sum(spent.values()),
        }
    return result


def _speeds(one: Measurement) -> list[float]:
    """Tokens per second of each repeat."""
    tokens = sum(map(len, one.written))
    return [tokens / seconds for seconds in one.seconds]
