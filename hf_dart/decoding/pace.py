"""What each round drafts: nothing, copied text alone, or the drafter's guesses beside it, by what that is worth.

Copied text costs nothing to draft. What a draft adds to it is measured: how often a draft was right as deep as that,
where the copy was not. Where that brings less for its time than copies alone do, the round is not drafted. A drafter
that is never worth its cost pauses, and is tried again later; where trees cannot shrink to what their nodes are worth,
chains are tried before that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import exp, sqrt
from typing import Any

import numpy as np

from hf_dart.decoding.costs import RoundCosts
from hf_dart.decoding.proposer import Proposer
from hf_dart.trees.arrays import Array
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.copies import Alone, Copy, alone

_STAKE = 3.0  # stock's steps that a first trial in one row may lose, later ones half of it; more rows scatter less
_HOPE = 0.75  # before a way is tried, a draft of d tokens is taken to be right with probability _HOPE**d
_MEMORY = 32.0  # drafts of one row that are remembered
_FIRST_WAIT, _LONGEST_WAIT = 48, 768  # rounds before a better way is tried again
_LONGER = 4  # times as long after each trial that did not pay
_TOLD_AFTER = 2  # pauses in one call
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


class Pace:
    """Weighs what drafts bring against what they cost (`RoundCosts`), over the rounds of one call."""

    def __init__(self, config: TreeConfig, device_type: str, depth: int, costs: RoundCosts | None = None) -> None:
        """`depth`: of a draft; 0 where there is copied text alone, which is verified at all times."""
        self._costs = costs or RoundCosts(config, device_type)
        self._weighs = depth > 0 and config.nodes is None
        self._depth = depth
        self.ever_drafts = config.nodes != 1
        """Is any round drafted?"""
        # On a host trees shrink to chains by themselves, and a chain spares nothing but other looks at the draft.
        self._chains = device_type != "cpu" or config.refine > 0
        self._emitted: list[int] = []
        self._surplus: Surplus | None = None  # of this way to draft; None before it is tried
        self._stake = _STAKE
        self._level = LEVELS.index(TREE if self.ever_drafts else PAUSE)
        self._wait = [_FIRST_WAIT] * len(LEVELS)  # of each level, before the next one is tried
        self._left = 0  # rounds of it
        self._pauses = 0
        self._drafted = [0, 0]  # rows of rounds with drafts, and their tokens
        self._copies: Sequence[Copy] = ()
        self._alone = Alone(1.0, 1.0, 0)

    @property
    def level(self) -> str:
        """How rounds are drafted now where copies alone are not worth more, one of `LEVELS`."""
        return LEVELS[self._level]

    def choose(self, copies: Sequence[Copy], parts: Sequence[float], deepest: Sequence[int]) -> str:
        """How the coming round is to be drafted, one of `LEVELS`.

        Args:
            copies: of each row.
            parts: what a token of each row counts for (`shares`).
            deepest: deepest node of each row's tree.
        """
        if not self._weighs or self.level == PAUSE:
            return self.level
        rows = sum(part > 0 for part in parts)
        self._copies, self._alone = copies, alone(copies, parts, self._costs(rows, drafted=False))
        if self._surplus is None:
            self._surplus = Surplus(self._depth, self._stake * sqrt(rows), self._charged(rows))
        surplus = self._surplus
        each = zip(parts, copies, deepest, strict=True)
        brings = sum(part * surplus.expected(copy, self._alone.depth, most) for part, copy, most in each if part)
        charged = self._charged(rows)
        if brings >= self._alone.rate * charged or not (surplus.rounds or self._alone.depth):  # a trial has a round
            return self.level
        if self._alone.depth or surplus.chances.sum() >= charged:  # it is this round that is not worth it
            return PAUSE
        self._step(-1)
        self._left = self._wait[self._level]
        self._wait[self._level] = min(_LONGER * self._left, _LONGEST_WAIT)
        self._pauses += self.level == PAUSE
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
        self._left -= 1
        if self.level == PAUSE:
            if self._left == 0:
                self._step(1)
            return
        surplus = self._surplus
        if level == PAUSE or surplus is None:
            return
        parts = shares(before, limits)
        many = 1 / (sum(part * part for part in parts) or 1.0)  # rows, by what they count for
        for row, part in enumerate(parts):
            right = _right(self._copies[row][0], came[row])
            if part and right is not None:
                most = min(self._depth, limits[row] - 1)
                surplus.learn(part * many, right, emitted[row] - 1, most)
        rows = sum(limit > 0 for limit in limits)
        cost = self._costs(rows, refined=level != CHAIN)
        surplus.charge(cost.of(nodes, levels) - cost.draft - self._alone.cost)
        self._drafted = [self._drafted[0] + rows, self._drafted[1] + sum(emitted)]
        if surplus.shown > self._charged(rows):
            self._wait[self._next(-1)] = _FIRST_WAIT
            if self.level == CHAIN and self._left <= 0:
                self._step(1)

    def _charged(self, rows: int) -> float:
        """What a draft and its nodes cost."""
        nodes = 0.0 if self._surplus is None else max(self._surplus.nodes, 0.0)
        return self._costs(rows, refined=self.level != CHAIN).draft + nodes

    def _step(self, by: int) -> None:
        self._level = self._next(by)
        self._surplus, self._stake = None, _STAKE / 2

    def _next(self, by: int) -> int:
        level = self._level + by
        return level if self._chains or LEVELS[level] != CHAIN else level + by

    def warn_once(self, drafter: Proposer[Any]) -> None:
        """Say once per drafter that its drafts do not pay, and what is likely wrong."""
        if self._pauses < _TOLD_AFTER or drafter.warned:
            return
        drafter.warned = True
        rows, tokens = self._drafted
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
