"""Figures of a server for Prometheus, under vLLM's names, which its dashboards and harnesses read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hf_dart.decoding.stats import DraftStats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class Metrics:
    """Counters, gauges and histograms of one server, in a registry of their own.

    A draft is one round of one text; its draft tokens are the nodes of its tree, the root excluded, and the accepted
    ones lie on one path, so that 1 + accepted / drafts is the acceptance length.
    """

    def __init__(self, model: str) -> None:
        self._registry, self._model = CollectorRegistry(), model
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        self._drafts, self._drafted, self._accepted = (self._made(Counter, f"spec_decode_{name}") for name in names)
        self._per_depth = self._made(Counter, "spec_decode_num_accepted_tokens_per_pos", "position")
        self._read, self._written = (self._made(Counter, name) for name in ("prompt_tokens", "generation_tokens"))
        self._ends = self._made(Counter, "request_success", "finished_reason")
        self._first = self._made(Histogram, "time_to_first_token_seconds", buckets=_SECONDS)
        self._whole = self._made(Histogram, "e2e_request_latency_seconds", buckets=_SECONDS)

    def watch(self, name: str, value: Callable[[], float]) -> None:
        """Add a gauge, whose value is asked for whenever somebody looks."""
        self._made(Gauge, name).labels(self._model).set_function(value)

    def token(self) -> None:
        """Count a token that was written."""
        self._written.labels(self._model).inc()

    def ended(self, prompt_tokens: int, first: float | None, seconds: float, ends: Iterable[str]) -> None:
        """Count a request: its tokens, seconds to its first token and to its end, and the ends of its texts."""
        self._read.labels(self._model).inc(prompt_tokens)
        self._whole.labels(self._model).observe(seconds)
        if first is not None:
            self._first.labels(self._model).observe(first)
        for end in ends:
            self._ends.labels(self._model, end).inc()

    def drafted(self, stats: DraftStats) -> None:
        """Count the drafts of a text."""
        self._drafts.labels(self._model).inc(stats.row_rounds)
        self._drafted.labels(self._model).inc(stats.drafted)
        self._accepted.labels(self._model).inc(stats.accepted)
        for depth, count in enumerate(stats.accepted_per_depth):
            self._per_depth.labels(self._model, str(depth)).inc(count)

    def text(self) -> bytes:
        """Return all of them in Prometheus' format."""
        return generate_latest(self._registry)

    def _made(self, kind: type, name: str, *labels: str, **options: object) -> Any:
        about = name.replace("_", " ")
        return kind(f"vllm:{name}", about, ["model_name", *labels], registry=self._registry, **options)
