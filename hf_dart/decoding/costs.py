"""`RoundCosts`: what rounds of one call cost, as its `TreeConfig` says, and drafts as its rounds have shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from hf_dart.trees.config import TreeConfig
from hf_dart.trees.costs import RoundCost

LEAST, KEPT = 3, 32
"""Rounds before what they took counts, and the last ones of which it is the median."""
_CHANGE = 0.05  # of the cost, below which it stays as it is

Timings = dict[tuple[int, int | None], tuple[float, ...]]
"""By rows and depth, what drafting and growing cost in the last rounds, relative to a round without."""


class RoundCosts:
    """What a round costs, relative to one without a draft; the one place that tree growth and `Pace` ask.

    A draft costs what `TreeConfig.draft_cost` says. Where that was an estimate and `timings` are given, it costs what
    drafting and growing its trees took in the last rounds beside the target's forward, all timed in the same round, so
    that a busy machine slows all: the median, as single rounds are late. Only where time is what the host spends, on a
    CPU: elsewhere nothing is timed, which would wait for the device.

    Args:
        config: of the call, its `draft_cost` known or estimated.
        device_type: of the target.
        timings: of the drafter's calls so far, which go on in it; None takes the cost as it is.
    """

    def __init__(self, config: TreeConfig, device_type: str, timings: Timings | None = None) -> None:
        self._config, self._device, self._timings = config, device_type, timings
        self._spent: dict[str, float] = {}
        self._known: dict[tuple[int, bool, bool], RoundCost] = {}

    def __call__(self, rows: int, drafted: bool = True, refined: bool = True) -> RoundCost:
        """Of a round of so many rows.

        Args:
            drafted: there is a draft, and not copied text alone.
            refined: the drafter looks at it again, as often as the config says.
        """
        key = (rows, drafted, refined)
        if key not in self._known:
            config = self._config if refined else replace(self._config, refine=0)
            self._known[key] = config.round_cost(rows, self._device, drafted)
        return self._known[key]

    def count(self, seconds: Mapping[str, float], rows: int, nodes: int, levels: int, drafted: bool) -> None:
        """Learn from a round.

        Args:
            seconds: spent in each phase of the call so far.
            rows: of the batch.
            nodes, levels: of its trees, the root and its level not counted among the levels.
            drafted: there was a draft.
        """
        spent = {name: seconds.get(name, 0.0) for name in ("draft", "grow", "verify")}
        before, self._spent = self._spent, spent
        if self._timings is None or not drafted:
            return
        draft, grow, verify = (spent[name] - before.get(name, 0.0) for name in spent)
        if verify <= 0:
            return
        key = (rows, self._config.depth)
        cost = (draft + grow) / verify * self(rows, drafted=False).of(nodes, levels)
        # No list that grows: another thread may read it.
        self._timings[key] = (*self._timings.get(key, ())[1 - KEPT :], cost)
        self._learn(self._timings[key])

    def begin(self, rows: int) -> None:
        """A call of so many rows begins: take what calls before it have shown."""
        if self._timings is not None:
            self._learn(self._timings.get((rows, self._config.depth), ()))

    def _learn(self, rounds: tuple[float, ...]) -> None:
        if len(rounds) < LEAST:
            return
        cost, known = median(rounds), self._config.draft_cost or 0.0
        if abs(cost - known) > _CHANGE * known:
            self._config = replace(self._config, draft_cost=cost)
            self._known.clear()
