"""When a tree does not pay, a chain is drafted; when that does not, drafting pauses and only copied text is verified.

Both are tried again later, less and less often while they fail.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from hf_dart.configuration import TreeConfig
from hf_dart.proposal import Drafter

_TRIAL, _RETRIAL = 8, 4  # rounds before a way to draft is judged: at first, and when it is tried again
_MEMORY = 0.9  # weight of what is known against the newest round
_FIRST_WAIT, _LONGEST_WAIT = 32, 256  # rounds before a better way is tried again
_TOLD_AFTER = 2  # pauses in one call

LEVELS = PAUSE, CHAIN, TREE = "pause", "chain", "tree"

_LOGGER = logging.getLogger(__name__)


class Pace:
    """Weighs what drafts bring against what they cost (`TreeConfig.round_cost`), over the rounds of one call.

    Costs are given, not timed: equal calls make equal rounds, also where rounding depends on their shape.
    """

    def __init__(self, config: TreeConfig, device_type: str, drafts: bool = True) -> None:
        """`drafts`: there is a drafter, and not copied text alone, which is verified at all times."""
        self._config, self._device = config, device_type
        self._weighs = drafts and config.nodes is None
        self.ever_drafts = config.nodes != 1
        """Is any round drafted?"""
        self._gain = 0.0  # running mean of tokens per row, less what the round cost in rounds without drafts
        self._rounds = 0  # of this trial
        self._trial = _TRIAL
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

    def count(self, emitted: list[int], limits: list[int], nodes: int) -> None:
        """Learn from a round, given as to `DraftStats.count`."""
        if not self._weighs:
            return
        self._left -= 1
        if self.level == PAUSE:
            if self._left == 0:
                self._step(1)
            return
        rows = sum(limit > 0 for limit in limits)
        config = replace(self._config, refine=0) if self.level == CHAIN else self._config
        cost = config.round_cost(rows, self._device).of(nodes)
        memory = min(_MEMORY, self._rounds / (self._rounds + 1))
        self._gain = memory * self._gain + (1 - memory) * (sum(emitted) / rows - cost)
        self._rounds += 1
        self._drafted = [self._drafted[0] + rows, self._drafted[1] + sum(emitted)]
        if self._rounds < self._trial:
            return
        if self._gain < 0:
            self._step(-1)
            self._left = self._wait[self._level]
            self._wait[self._level] = min(2 * self._left, _LONGEST_WAIT)
            self._pauses += self.level == PAUSE
            return
        self._wait[self._level - 1] = _FIRST_WAIT
        if self.level == CHAIN and self._left <= 0:
            self._step(1)

    def _step(self, by: int) -> None:
        self._level += by
        self._gain, self._rounds, self._trial = 0.0, 0, _RETRIAL

    def tell(self, drafter: Drafter[Any]) -> None:
        """Say once per drafter that its drafts do not pay, and what is likely wrong."""
        if self._pauses < _TOLD_AFTER or drafter.told:
            return
        drafter.told = True
        rows, tokens = self._drafted
        _LOGGER.warning(
            f"The drafts of this {type(drafter).__name__} brought {tokens / rows:.2f} tokens per round, which is less "
            "than they cost here, so drafting paused; the output is the same. Likely causes: a prompt without the chat "
            "template that the drafter was trained with; text of another language or kind; thinking switched on or off "
            "against its training; a drafter for another target; or costs of another machine (`hf-dart profile` "
            "measures them)."
        )
