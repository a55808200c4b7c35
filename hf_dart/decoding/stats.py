"""Statistics of one call: rounds, tokens, τ, acceptance, and seconds per phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from hf_dart.decoding.trace import Trace
from hf_dart.view.statistics import summary

PHASES = ("prefill", "draft", "grow", "verify", "walk", "commit")


@dataclass
class DraftStats:
    """Statistics of one `generate` call, counted over all its rows: rounds, tokens, acceptance, time.

    Attributes:
        rounds: target forwards that verified a tree (the prefill is not one).
        plain_rounds: those of them that verified the root alone, no node being worth its cost.
        chain_rounds: those that were drafted as a chain, a tree not being worth its cost (`decoding.pace`).
        paused_rounds: those that were not drafted, copied text alone being worth more, or drafts not asked for.
        row_rounds: `rounds`, counted once for every row that was still running.
        tokens: tokens that those rounds committed, bonus tokens included (the prefill's own token is not).
        drafted: tree nodes that were verified, roots excluded.
        accepted_per_depth: how often the node at depth 1, 2, ... was accepted.
        committed: tokens that each row committed, round by round; all but the last of a round were drafted.
        seconds: wall time per phase. On an accelerator a phase ends when its work is launched, and waiting
            falls to the first phase that reads a result.
        trace: every round with its tree, where `generate(..., trace=True)` asked for it.
    """

    rounds: int = 0
    plain_rounds: int = 0
    chain_rounds: int = 0
    paused_rounds: int = 0
    row_rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    committed: list[list[int]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    trace: Trace | None = None

    @property
    def tau(self) -> float:
        """Tokens committed per target forward and row, bonus included."""
        return self.tokens / self.row_rounds if self.row_rounds else 0.0

    @property
    def accepted(self) -> int:
        """Drafted tokens that the target confirmed."""
        return sum(self.accepted_per_depth)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; a wide tree lowers it while it raises τ."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `seconds[name]`."""
        start = perf_counter()
        try:
            yield
        finally:
            self._spend(name, perf_counter() - start)

    def count(self, emitted: list[int], limits: list[int], nodes: int, mode: str = "tree") -> None:
        """Add one round to the counts.

        Args:
            emitted: tokens that each row committed; all but the last of them were drafted.
            limits: what each could have committed; rows with 0 took no part.
            nodes: size of the tree, its root included.
            mode: how it was drafted, one of `pace.MODES`.
        """
        self.rounds += 1
        self.plain_rounds += nodes == 1
        self.chain_rounds += mode == "chain"
        self.paused_rounds += mode == "pause"
        self.committed.append(emitted)
        for tokens, limit in zip(emitted, limits, strict=True):
            if limit == 0:
                continue
            self.row_rounds += 1
            self.tokens += tokens
            self.drafted += nodes - 1
            self._accept([1] * (tokens - 1))

    def merge(self, other: DraftStats) -> None:
        """Add the counts and times of another call."""
        self.rounds += other.rounds
        self.plain_rounds += other.plain_rounds
        self.chain_rounds += other.chain_rounds
        self.paused_rounds += other.paused_rounds
        self.row_rounds += other.row_rounds
        self.tokens += other.tokens
        self.drafted += other.drafted
        self._accept(other.accepted_per_depth)
        self.committed += other.committed
        for name, seconds in other.seconds.items():
            self._spend(name, seconds)

    def _spend(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def _accept(self, per_depth: list[int]) -> None:
        self.accepted_per_depth += [0] * (len(per_depth) - len(self.accepted_per_depth))
        for depth, count in enumerate(per_depth):
            self.accepted_per_depth[depth] += count

    def _repr_html_(self) -> str:
        """Return the statistics as HTML, for notebooks."""
        return summary(self)

    def to_dict(self) -> dict[str, Any]:
        """All figures but those of single rounds, as numbers, lists and dicts that JSON takes."""
        return {
            "rounds": self.rounds,
            "plain_rounds": self.plain_rounds,
            "chain_rounds": self.chain_rounds,
            "paused_rounds": self.paused_rounds,
            "row_rounds": self.row_rounds,
            "tokens": self.tokens,
            "tau": self.tau,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "accepted_per_depth": list(self.accepted_per_depth),
            "seconds": dict(self.seconds),
        }
