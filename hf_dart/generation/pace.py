"""When drafting does not pay, it pauses: only copied text is verified then, and drafts are tried again later."""

from __future__ import annotations

from hf_dart.configuration import TreeConfig

_TRIAL = 8  # drafted rounds before drafting is judged, and again after every pause
_MEMORY = 0.9  # weight of what is known against the newest round
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256  # rounds


class Pace:
    """Weighs what drafts bring against `TreeConfig.draft_cost` and `node_cost`, over the rounds of one call.

    Costs are given, not timed: equal calls make equal rounds, also where rounding depends on their shape.
    """

    def __init__(self, config: TreeConfig) -> None:
        self._config = config
        self._worth = 0.0  # mean of tokens per row and round, less what the same time would bring without drafts
        self._trial = _TRIAL
        self._pause = 0  # rounds of it that are left
        self._next_pause = _FIRST_PAUSE

    @property
    def drafting(self) -> bool:
        """Is the coming round to be drafted?"""
        return self._pause == 0

    def count(self, emitted: list[int], limits: list[int], nodes: int) -> None:
        """Learn from a round, given as to `DraftStats.count`."""
        if self._config.nodes is not None:
            return
        if self._pause:
            self._pause -= 1
            return
        rows = sum(limit > 0 for limit in limits)
        cost = 1 + self._config.draft_cost + self._config.node_cost * rows * (nodes - 1)
        worth = sum(emitted) / rows - cost
        # The first rounds of a trial count alike.
        memory = _MEMORY if self._trial <= 0 else 1 - 1 / (_TRIAL + 1 - self._trial)
        self._worth = memory * self._worth + (1 - memory) * worth
        self._trial -= 1
        if self._trial > 0:
            return
        if self._worth >= 0:
            self._next_pause = _FIRST_PAUSE
        else:
            self._pause, self._trial = self._next_pause, _TRIAL
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
