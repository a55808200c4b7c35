"""`RoundCosts`: what rounds of one call cost, as its `TreeConfig` says, and on a CPU as its rounds have shown."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from hf_dart.trees.arrays import Array
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.costs import ANY_TREE, NODE_COST, RoundCost, VerifyCost

LEAST, KEPT = 3, 32
"""Drafts before what they took counts, and the last ones of which it is the median."""

BLOCK = 16
"""Rounds that show together what verifying costs."""

_CHANGE = 0.05  # of the cost of a draft, below which it stays as it is
_NOISE = 0.1  # by which equal rounds differ, relative to one without a draft
_FAR = 2.0  # times as much: the machine did something else, and more of it says no more
_TIMES = 6  # of weighing rounds by how far they are off
_DOUBT = np.array([0.3, 0.05, 0.2])  # of estimates: of a tree, of a node in one row, of a level
_DRIFT = np.array([0.02, 0.001, 0.01])  # of what was shown, from block to block
_PLAIN = 0.2  # of what a plain round was expected to take, below which no line fits the rounds
_FADES = 1 / 32  # of what was shown, in each block: costs that were too high once would never be shown again

Timed = tuple[int, int, float]
"""Nodes per row, levels below the roots and seconds of the forward that verified them."""


@dataclass(frozen=True)
class Shown:
    """What rounds have shown of verifying trees.

    Attributes:
        costs: [3] of a tree, a node more in every row, a level; relative to a round without a draft.
        doubt: [3, 3] their covariance.
    """

    costs: Array
    doubt: Array

    @property
    def cost(self) -> VerifyCost:
        """The costs by name."""
        return VerifyCost(*self.costs.tolist())

    @classmethod
    def nothing(cls, rows: int, level: float) -> Shown:
        """Estimates, before any round.

        Args:
            rows: of the batch.
            level: what a level costs.
        """
        return cls(np.array([ANY_TREE, NODE_COST * rows, level]), np.diag((_DOUBT * [1, rows, 1]) ** 2))

    def faded(self, estimate: Shown) -> Shown:
        """A little nearer to the estimate."""
        return replace(self, costs=self.costs + _FADES * (estimate.costs - self.costs))

    def after(self, rounds: Sequence[Timed], rows: int, learns_level: bool) -> Shown:
        """With what a block of rounds shows, by least squares; rounds that are far off count less (Huber's weights).

        What the rounds cannot tell apart, as with trees of one size alone, stays as it was.

        Args:
            rounds: in a row, so that the machine was equally quick in all.
            rows: of the batch.
            learns_level: what a level costs is an estimate, too.
        """
        nodes, levels, seconds = np.array(rounds).T
        parts = np.stack([np.ones_like(nodes), nodes > 1, nodes - 1, levels], axis=1)
        if not learns_level:
            parts[:, 0] += self.costs[2] * parts[:, 3]
            parts[:, 3] = 0
        seconds = seconds / median(seconds / (parts @ [1, *self.costs]))  # np.median would import numpy.ma
        # Unknown are a plain round's seconds, about 1, and the costs in them; of these, less what is known of them in
        # plain rounds, the mean is 0.
        doubt = self.doubt + np.diag((_DRIFT * [1, rows, 1]) ** 2)
        known = np.concatenate([-self.costs[:, None], np.eye(3)], axis=1)
        before = known.T @ np.linalg.inv(doubt) @ known
        weights = np.ones(len(rounds))
        for _ in range(_TIMES):
            weighted = parts * (weights / _NOISE**2)[:, None]
            precision = before + weighted.T @ parts
            found = np.linalg.solve(precision, weighted.T @ seconds)
            weights = 1 / np.maximum(np.abs(seconds - parts @ found) / (_FAR * _NOISE), 1)
        if found[0] < _PLAIN:
            return replace(self, doubt=doubt)
        costs = np.maximum(found[1:] / found[0], 0.0)
        relative = np.concatenate([-costs[:, None], np.eye(3)], axis=1) / found[0]
        return Shown(costs, relative @ np.linalg.inv(precision) @ relative.T)


@dataclass
class Timings:
    """What rounds with one drafter took.

    Attributes:
        drafts: by rows and depth, what drafting and growing cost in the last rounds, relative to a round without.
        rounds: by rows and what a level is said to cost (None: an estimate), those of the block that is not full yet.
        verify: by the same, what the blocks so far have shown.
    """

    drafts: dict[tuple[int, int | None], tuple[float, ...]] = field(default_factory=dict)
    rounds: dict[tuple[int, float | None], tuple[Timed, ...]] = field(default_factory=dict)
    verify: dict[tuple[int, float | None], Shown] = field(default_factory=dict)


class RoundCosts:
    """What a round costs, relative to one without a draft; the one place that tree growth and `Pace` ask.

    Rounds cost what the `TreeConfig` says. For what it does not say there are estimates, until rounds have shown what
    they take:

    - A draft costs what drafting and growing its trees took in the last rounds beside the target's forward, all timed
      in the same round, so that a busy machine slows all: the median, as single rounds are late.
    - Verifying costs what fits rounds best, a few in a row at a time: so much for any tree, each node and each level.

    Args:
        config: of the call, its `draft_cost` known or estimated.
        device_type: of the target.
        timings: of the drafter's calls so far, which go on in it.
        estimated: what rounds are to show, of `estimated_costs`.
    """

    def __init__(
        self,
        config: TreeConfig,
        device_type: str,
        timings: Timings | None = None,
        estimated: Collection[str] = (),
    ) -> None:
        self._config, self._device, self._estimated = config, device_type, estimated
        self._said = None if "level_cost" in estimated else config.level_cost
        self._timings = timings or Timings()
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
            cost = config.round_cost(rows, self._device, drafted)
            shown = self._timings.verify.get((rows, self._said)) if "node_cost" in self._estimated else None
            self._known[key] = cost if shown is None else RoundCost.linear(cost.draft, shown.cost)
        return self._known[key]

    def begin(self, rows: int) -> None:
        """A call of so many rows begins: take what calls before it have shown."""
        self._learn_draft(rows)

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
        draft, grow, verify = (spent[name] - before.get(name, 0.0) for name in spent)
        if verify <= 0:
            return
        timings = self._timings
        if "draft_cost" in self._estimated and drafted:
            key = (rows, self._config.depth)
            cost = (draft + grow) / verify * self(rows, drafted=False).of(nodes, levels)
            # No list that grows: another thread may read it.
            timings.drafts[key] = (*timings.drafts.get(key, ())[1 - KEPT :], cost)
            self._learn_draft(rows)
        if "node_cost" in self._estimated:
            self._learn_verify(rows, (nodes, levels, verify))

    def _learn_draft(self, rows: int) -> None:
        rounds = self._timings.drafts.get((rows, self._config.depth), ())
        if "draft_cost" not in self._estimated or len(rounds) < LEAST:
            return
        cost, known = median(rounds), self._config.draft_cost or 0.0
        if abs(cost - known) > _CHANGE * known:
            self._config = replace(self._config, draft_cost=cost)
            self._known.clear()

    def _learn_verify(self, rows: int, last: Timed) -> None:
        timings, key = self._timings, (rows, self._said)
        block = (*timings.rounds.get(key, ()), last)
        timings.rounds[key] = block if len(block) < BLOCK else ()
        if len(block) >= BLOCK:
            estimate = Shown.nothing(rows, self._config.level_cost or 0.0)
            shown = timings.verify.get(key, estimate).faded(estimate)
            timings.verify[key] = shown.after(block, rows, "level_cost" in self._estimated)
            self._known.clear()


def estimated_costs(config: TreeConfig, device_type: str, by_levels: bool) -> frozenset[str]:
    """The costs that `config` does not say and that rounds are to show, by the names of its fields.

    On a CPU, where time is what the host spends (elsewhere timing would wait for the device), and for trees without a
    given size, with which they are grown whatever they cost.

    Args:
        config: as the call has it.
        device_type: of the target.
        by_levels: does it compute trees level by level?
    """
    if config.nodes is not None or device_type != "cpu":
        return frozenset()
    unknown = {name for name in ("draft_cost", "node_cost", "level_cost") if getattr(config, name) is None}
    if config.verify_costs or "node_cost" not in unknown:
        return frozenset(unknown & {"draft_cost"})
    return frozenset(unknown if by_levels else unknown - {"level_cost"})
