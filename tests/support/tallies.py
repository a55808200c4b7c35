"""Sums over the runs of test files. Nothing is imported for them that takes long: all processes of a session do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Sums of the runs of one test file; printed at the end of the session.

    Their mean tau has to be above `least` when the file is through (`conftest.py`).
    """

    title: str
    least: float = 1.0
    taus: list[float] = field(default_factory=list)
    near_ties: list[str] = field(default_factory=list)

    def add(self, stats: Any) -> None:
        if stats.rounds:
            self.taus.append(stats.tau)

    @property
    def mean_tau(self) -> float:
        return sum(self.taus) / len(self.taus)

    def __str__(self) -> str:
        lines = [f"{self.title}: mean tau {self.mean_tau:.2f} over {len(self.taus)} runs"]
        lines.append(f"  {len(self.near_ties)} differences at near-ties of stock's own")
        return "\n".join([*lines, *(f"    {case}" for case in self.near_ties)])


TALLIES: dict[str, Tally] = {}


def tally(title: str, least: float = 1.0) -> Tally:
    """The session's tally of that title."""
    return TALLIES.setdefault(title, Tally(title, least))
