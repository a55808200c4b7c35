"""When drafts do not pay, drafting pauses and only copied text is verified; it is tried again later.

Where trees cannot shrink to what their nodes are worth, chains are tried before that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import exp, log, sqrt
from typing import Any

from hf_dart.decoding.costs import RoundCosts
from hf_dart.decoding.proposer import Proposer
from hf_dart.trees.config import TreeConfig

_TRIAL, _RETRIAL = 8, 4  # rounds before a way to draft is judged: at first, and when it is tried again
_STAKE = 3.0  # stock's steps that a trial in one row may lose; means over more rows scatter less
_MEMORY = 0.9  # weight of what is known against the newest round
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


def headway(emitted: Sequence[int], new: Sequence[int], limits: Sequence[int]) -> float:
    """How far `new` tokens of each row bring the batch, in tokens of all rows: between the least and their mean.

    It is the growth of a soft minimum over the rows, of which `shares` is the slope: n tokens in every row are n.
    """
    parts = shares(emitted, limits)
    least = min((tokens for tokens, part in zip(new, parts, strict=True) if part), default=0)
    left = sum(part * exp((least - tokens) / _LEAD) for tokens, part in zip(new, parts, strict=True))
    return least - _LEAD * log(left) if left else 0.0


class Pace:
    """Weighs what drafts bring against what they cost (`RoundCosts`), over the rounds of one call."""

    def __init__(
        self, config: TreeConfig, device_type: str, drafts: bool = True, costs: RoundCosts | None = None
    ) -> None:
        """`drafts`: there is a drafter, and not copied text alone, which is verified at all times."""
        self._costs = costs or RoundCosts(config, device_type)
        self._weighs = drafts and config.nodes is None
        self.ever_drafts = config.nodes != 1
        """Is any round drafted?"""
        # On a host trees shrink to chains by themselves, and a chain spares nothing but other looks at the draft.
        self._chains = device_type != "cpu" or config.refine > 0
        self._emitted: list[int] = []
        self._gain = 0.0  # running mean of `headway`, less what the round cost in rounds without drafts
        self._lost = 0.0  # in this trial
        self._rounds = 0  # of this trial
        self._trial, self._stake = _TRIAL, _STAKE
        self._level = LEVELS.index(TREE if self.ever_drafts else PAUSE)
        self._wait = [_FIRST_WAIT] * len(LEVELS)  # of each level, before the next one is tried
        self._left = 0  # rounds of it
        self._pauses = 0
        self._drafted = [0, 0]  # rows of rounds with drafts, and their tokens

    @property
    def level(self) -> str:
        """How the coming round is to be drafted, one of `LEVELS`."""
        return LEVELS[self._level]

    @property
    def drafting(self) -> bool:
        """Is the coming round to be drafted?"""
        return self.level != PAUSE

    def count(self, emitted: list[int], limits: list[int], nodes: int, levels: int = 0) -> None:
        """Learn from a round, given as to `DraftStats.count`, whose trees had so many levels below the root."""
        if not self._weighs:
            return
        before = self._emitted or [0] * len(emitted)
        self._emitted = [tokens + new for tokens, new in zip(before, emitted, strict=True)]
        self._left -= 1
        if self.level == PAUSE:
            if self._left == 0:
                self._step(1)
            return
        rows = sum(limit > 0 for limit in limits)
        cost = self._costs(rows, refined=self.level != CHAIN).of(nodes, levels)
        gain = headway(before, emitted, limits) - cost
        memory = min(_MEMORY, self._rounds / (self._rounds + 1))
        self._gain = memory * self._gain + (1 - memory) * gain
        self._lost -= gain
        self._rounds += 1
        self._drafted = [self._drafted[0] + rows, self._drafted[1] + sum(emitted)]
        if self._rounds < self._trial and self._lost < self._stake / sqrt(rows):
            return
        if self._gain < 0:
            self._step(-1)
            self._left = self._wait[self._level]
            self._wait[self._level] = min(_LONGER * self._left, _LONGEST_WAIT)
            self._pauses += self.level == PAUSE
            return
        self._wait[self._next(-1)] = _FIRST_WAIT
        if self.level == CHAIN and self._left <= 0:
            self._step(1)

    def _step(self, by: int) -> None:
        self._level = self._next(by)
        self._gain, self._lost, self._rounds = 0.0, 0.0, 0
        self._trial, self._stake = _RETRIAL, _STAKE / 2

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
