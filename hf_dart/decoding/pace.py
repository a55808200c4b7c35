"""What each round drafts: nothing, copied text alone, or the drafter's guesses beside it, by what that is worth.

Copied text costs nothing to draft. What a draft adds to it is measured: how often a draft was right as deep as that,
where the copy was not. Where that brings less for its time than copies alone do, the round is not drafted. A drafter
that is never worth its cost pauses, and is tried again later; where trees cannot shrink to what their nodes are worth,
chains are tried before that. A call goes on where the last one of its kind has come to (`Experience`), so that short
calls need no trials of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from math import exp, sqrt
from typing import Any

from hf_dart.decoding.costs import RoundCosts
from hf_dart.decoding.experience import Course, Experience, Surplus
from hf_dart.drafters.base import Drafter
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.copies import Alone, Copy, alone

_STAKE = 3.0  # stock's steps that a first trial in one row may lose, later ones half of it; more rows scatter less
_FIRST_WAIT, _LONGEST_WAIT = 48, 768  # rounds before a better way is tried again
_LONGER = 4  # times as long after each trial that did not pay
_TOLD_AFTER = 2  # pauses in which drafts never paid
_LEAD = 8.0  # tokens by which a row is ahead of another when it counts for a factor of e less

LEVELS = PAUSE, CHAIN, TREE = "pause", "chain", "tree"

_LOGGER = logging.getLogger(__name__)


def shares(emitted: Sequence[int], limits: Sequence[int]) -> list[float]:
    """What a token more of each row counts for the batch, which is done when its slowest row is; they sum to 1.

    Args:
        emitted: tokens of each row so far.
        limits: what each may emit in the coming round; rows with 0 take no part.
    """
    slowest = min((tokens for tokens, limit in zip(emitted, limits, strict=True) if limit > 0), default=0)
    rows = zip(emitted, limits, strict=True)
    parts = [exp((slowest - tokens) / _LEAD) if limit > 0 else 0.0 for tokens, limit in rows]
    total = sum(parts) or 1.0
    return [part / total for part in parts]


class Pace:
    """Weighs what drafts bring against what they cost (`RoundCosts`), over the rounds of one call.

    Args:
        config, device_type: of the call.
        depth: of a draft; 0 where there is copied text alone, which is verified at all times.
        costs: of its rounds; None takes them as `config` says.
        experience, kind: what calls have learnt, and which of them this one goes on with; None begins from nothing.
    """

    def __init__(
        self,
        config: TreeConfig,
        device_type: str,
        depth: int,
        costs: RoundCosts | None = None,
        experience: Experience | None = None,
        kind: Hashable = None,
    ) -> None:
        self._costs = costs or RoundCosts(config, device_type)
        self._weighs = depth > 0 and config.nodes is None
        self._depth = depth
        self.ever_drafts = config.nodes != 1
        """Is any round drafted?"""
        # On a host trees shrink to chains by themselves, and a chain spares nothing but other looks at the draft.
        self._chains = device_type != "cpu" or config.refine > 0
        self._emitted: list[int] = []
        first = Course(LEVELS.index(TREE if self.ever_drafts else PAUSE), [_FIRST_WAIT] * len(LEVELS), _STAKE)
        self._course = (experience or Experience()).go_on(kind, first)
        self._copies: Sequence[Copy] = ()
        self._alone = Alone(1.0, 1.0, 0)

    @property
    def level(self) -> str:
        """How rounds are drafted now where copies alone are not worth more, one of `LEVELS`."""
        return LEVELS[self._course.level]

    def choose(self, copies: Sequence[Copy], parts: Sequence[float], deepest: Sequence[int]) -> str:
        """How the coming round is to be drafted, one of `LEVELS`.

        Args:
            copies: of each row.
            parts: what a token of each row counts for (`shares`).
            deepest: deepest node of each row's tree.
        """
        if not self._weighs or self.level == PAUSE:
            return self.level
        batch, course = len(parts), self._course  # rows that have ended are computed with the others
        self._copies, self._alone = copies, alone(copies, parts, self._costs(batch, drafted=False))
        if course.surplus is None:
            running = sum(part > 0 for part in parts)
            course.surplus = Surplus(self._depth, course.stake * sqrt(running), self._charged(batch))
        surplus = course.surplus
        each = zip(parts, copies, deepest, strict=True)
        brings = sum(part * surplus.expected(copy, self._alone.depth, most) for part, copy, most in each if part)
        charged = self._charged(batch)
        if brings >= self._alone.rate * charged or not (surplus.rounds or self._alone.depth):  # a trial has a round
            return self.level
        if self._alone.depth or surplus.chances.sum() >= charged:  # it is this round that is not worth it
            return PAUSE
        self._step(-1)
        course.left = course.wait[course.level]
        course.wait[course.level] = min(_LONGER * course.left, _LONGEST_WAIT)
        course.pauses += self.level == PAUSE
        return self.choose(copies, parts, deepest)

    def count(
        self,
        level: str,
        came: Sequence[Sequence[int]],
        limits: Sequence[int],
        nodes: int,
        levels: int,
    ) -> None:
        """Learn from a round.

        Args:
            level: what `choose` said.
            came: the tokens that each row emitted.
            limits, nodes: as for `DraftStats.count`.
            levels: of its trees, below the root.
        """
        if not self._weighs:
            return
        emitted = [len(tokens) for tokens in came]
        before = self._emitted or [0] * len(emitted)
        self._emitted = [tokens + new for tokens, new in zip(before, emitted, strict=True)]
        course, surplus = self._course, self._course.surplus
        course.left -= 1
        if self.level == PAUSE:
            if course.left == 0:
                self._step(1)
            return
        if level == PAUSE or surplus is None:
            return
        parts = shares(before, limits)
        many = 1 / (sum(part * part for part in parts) or 1.0)  # rows, by what they count for
        for row, part in enumerate(parts):
            right = _right(self._copies[row][0], came[row])
            if part and right is not None:
                most = min(self._depth, limits[row] - 1)
                surplus.learn(part * many, right, emitted[row] - 1, most)
        cost = self._costs(len(limits), refined=level != CHAIN)
        surplus.charge(cost.of(nodes, levels) - cost.draft - self._alone.cost)
        running = sum(limit > 0 for limit in limits)
        course.drafted = (course.drafted[0] + running, course.drafted[1] + sum(emitted))
        if surplus.shown > self._charged(len(limits)):
            course.wait[self._next(-1)], course.pauses = _FIRST_WAIT, 0
            if self.level == CHAIN and course.left <= 0:
                self._step(1)

    def _charged(self, batch: int) -> float:
        """What a draft and its nodes cost."""
        surplus = self._course.surplus
        nodes = 0.0 if surplus is None else max(surplus.nodes, 0.0)
        return self._costs(batch, refined=self.level != CHAIN).draft + nodes

    def _step(self, by: int) -> None:
        course = self._course
        course.level, course.surplus, course.stake = self._next(by), None, _STAKE / 2

    def _next(self, by: int) -> int:
        level = self._course.level + by
        return level if self._chains or LEVELS[level] != CHAIN else level + by

    def warn_once(self, drafter: Drafter[Any]) -> None:
        """Say once per drafter that its drafts do not pay, and what is likely wrong."""
        if self._course.pauses < _TOLD_AFTER or drafter.warned:
            return
        drafter.warned = True
        rows, tokens = self._course.drafted
        _LOGGER.warning(
            f"The drafts of this {type(drafter).__name__} brought {tokens / rows:.2f} tokens per round, which is less "
            "than they cost here, so drafting paused; the output is the same. Likely causes: a prompt without the chat "
            "template that the drafter was trained with; text of another language or kind; thinking switched on or off "
            "against its training; a drafter for another target; or costs of another machine (`hf-dart profile` "
            "measures them)."
        )


def _right(copied: Sequence[int], came: Sequence[int]) -> int | None:
    """How many tokens of a copy came true before one that did not; None if all that came did, and it goes on."""
    for place, token in enumerate(came):
        if place == len(copied) or copied[place] != token:
            return place
    return None
