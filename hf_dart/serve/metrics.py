"""Figures of a server for Prometheus, under vLLM's names, which its dashboards and harnesses read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hf_dart.decoding.stats import DraftStats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class Metrics:
    """Counters, gauges and histograms of one server.

    A draft is one round of one text; its draft tokens are the nodes of its tree, the root excluded, and the accepted
    ones lie on one path, so that 1 + accepted / drafts is the acceptance length. `gauges` are asked whenever somebody
    looks.
    """

    def __init__(self, model: str, gauges: Mapping[str, Callable[[], float]]) -> None:
        self.registry, self._model = CollectorRegistry(), model
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        self._drafts, self._drafted, self._accepted = (self._made(Counter, f"spec_decode_{name}") for name in names)
        self._per_depth = self._made(Counter, "spec_decode_num_accepted_tokens_per_pos", "position")
        self._read, self.written = (self._made(Counter, name) for name in ("prompt_tokens", "generation_tokens"))
        self._ends = self._made(Counter, "request_success", "finished_reason")
        self._first = self._made(Histogram, "time_to_first_token_seconds", buckets=_SECONDS)
        self._whole = self._made(Histogram, "e2e_request_latency_seconds", buckets=_SECONDS)
        for name, value in gauges.items():
            self._made(Gauge, name).set_function(value)

    def ended(self, prompt_tokens: int, first: float | None, seconds: float, ends: Iterable[str]) -> None:
        """Count a request: its tokens, seconds to its first token and to its end, and the ends of its texts."""
        self._read.inc(prompt_tokens)
        self._whole.observe(seconds)
        if first is not None:
            self._first.observe(first)
        for end in ends:
            self._ends.labels(self._model, end).inc()

    def drafted(self, stats: DraftStats) -> None:
        """Count the drafts of a text."""
        self._drafts.inc(stats.row_rounds)
        self._drafted.inc(stats.drafted)
        self._accepted.inc(stats.accepted)
        for depth, count in enumerate(stats.accepted_per_depth):
            self._per_depth.labels(self._model, str(depth)).inc(count)

    def _made(self, kind: type, name: str, *labels: str, **options: object) -> Any:
        about = name.replace("_", " ")
        made = kind(f"vllm:{name}", about, ["model_name", *labels], registry=self.registry, **options)
        return made if labels else made.labels(self._model)
