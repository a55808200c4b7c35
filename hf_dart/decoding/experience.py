"""What calls with a drafter have learnt of it, for the calls after them: what drafts took, and what they brought."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from hf_dart.decoding.costs import Timings
from hf_dart.trees.arrays import Array
from hf_dart.trees.copies import Copy

_HOPE = 0.75  # before a way is tried, a draft of d tokens is taken to be right with probability _HOPE**d
_MEMORY = 32.0  # drafts of one row that are remembered
_KINDS = 64  # of calls that are remembered


class Surplus:
    """What drafts have brought beside copied text, depth by depth, and what their nodes cost.

    Args:
        depth: d, of a draft.
        stake: tokens to lose before drafts that bring nothing are known to.
        charged: what a draft costs, in tokens.

    Attributes:
        chances: [d] how likely a draft is right up to each depth where the copy is not.
        nodes: what verifying drafts costs beside copies alone, relative to a round without.
        rounds: that were drafted.
    """

    def __init__(self, depth: int, stake: float, charged: float) -> None:
        self._depths = np.arange(1, depth + 1)
        self.chances: Array = _HOPE**self._depths
        # After n drafts in vain, n * charged tokens are lost and hope is down to hoped * seen / (seen + n).
        hoped = float(self.chances.sum())
        self._seen = np.full(depth, stake / max(hoped - charged, hoped / 4, 1e-9))
        self._hope = self.chances * self._seen
        self.nodes, self.rounds = 0.0, 0

    @property
    def shown(self) -> float:
        """Tokens that drafts have been shown to bring where nothing is copied; the rest of `chances` is hope."""
        return float((self.chances - self._hope / self._seen).sum())

    def expected(self, copy: Copy, verified: int, deepest: int) -> float:
        """Tokens that a draft is expected to bring one row beside a copy.

        Args:
            copy: of the row; a tree holds it as deep as the draft goes.
            verified: tokens of it that are verified without a draft, too.
            deepest: deepest node of the tree.
        """
        depths = self._depths[: max(deepest, 0)]
        right = np.where(depths <= len(copy[0]), np.exp(copy[1] * depths), 0.0)
        brings = (1 - right) * self.chances[: len(depths)] + np.where(depths > verified, right, 0.0)
        return float(brings.sum())

    def learn(self, weight: float, right: int, accepted: int, deepest: int) -> None:
        """Learn from a row of a drafted round.

        Args:
            weight: of the row.
            right: tokens of its copy that came true, the next one being wrong or none.
            accepted: nodes on the path that was accepted.
            deepest: deepest node that its tree could have.
        """
        here = slice(right, max(deepest, right))
        hits = self._depths[here] <= accepted
        self._seen[here] = np.minimum(self._seen[here] + weight, _MEMORY)
        self.chances[here] += (hits - self.chances[here]) * np.minimum(weight / self._seen[here], 1)

    def charge(self, nodes: float) -> None:
        """Learn what verifying the draft of a round cost beside copies alone."""
        self.rounds += 1
        self.nodes += (nodes - self.nodes) * max(1 / self.rounds, 1 / _MEMORY)


@dataclass
class Course:
    """How rounds are drafted now, which calls of one kind go on with (`Pace`).

    Attributes:
        level: index of how rounds are drafted where copies alone are not worth more.
        wait: rounds of each level before the next one is tried.
        stake: stock's steps that a trial in one row may lose.
        surplus: what drafts of this level have brought; None before it is tried.
        left: rounds of the level before the next one is tried.
        pauses: since drafts last paid.
        drafted: rows of rounds with drafts, and their tokens.
    """

    level: int
    wait: list[int]
    stake: float
    surplus: Surplus | None = None
    left: int = 0
    pauses: int = 0
    drafted: tuple[int, int] = (0, 0)


@dataclass
class Experience:
    """What calls with one drafter have learnt; several calls at a time may use it.

    Attributes:
        timings: what its rounds took, where nobody said what they cost.
        courses: of the kinds of calls so far, the latest kind last.
    """

    timings: Timings = field(default_factory=Timings)
    courses: dict[Hashable, Course] = field(default_factory=dict)

    def go_on(self, kind: Hashable, first: Course) -> Course:
        """The course of a call that begins: where the last one of its kind has come to, `first` if there was none.

        It is the call's own to change, and what the next call goes on with.
        """
        course = copy.deepcopy(self.courses.pop(kind, first))
        self.courses[kind] = course
        for oldest in list(self.courses)[:-_KINDS]:
            self.courses.pop(oldest, None)
        return course
