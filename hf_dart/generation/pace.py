"""When drafting does not pay, it pauses: only copied text is verified then, and drafts are tried again later."""

from __future__ import annotations

from hf_dart.configuration import TreeConfig

_TRIAL, _RETRIAL = 8, 4  # drafted rounds before drafting is judged: at first, and after every pause
_MEMORY = 0.9  # weight of what is known against the newest round
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 256  # rounds


class Pace:
    """Weighs what drafts bring against `TreeConfig.draft_cost` and `node_cost`, over the rounds of one call.

    A batch is done when its slowest row is, so that row's tokens count. Costs are given, not timed: equal calls
    make equal rounds, also where rounding depends on their shape.
    """

    def __init__(self, config: TreeConfig, batch_size: int) -> None:
        self._config = config
        self._tokens = [0.0] * batch_size  # running means per row of a trial
        self._cost = 0.0  # running mean, in rounds without drafts
        self._rounds = 0  # of this trial
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
        active = [row for row, limit in enumerate(limits) if limit > 0]
        memory = min(_MEMORY, self._rounds / (self._rounds + 1))
        cost = 1 + self._config.draft_cost + self._config.node_cost * len(active) * (nodes - 1)
        self._cost = memory * self._cost + (1 - memory) * cost
        for row in active:
            self._tokens[row] = memory * self._tokens[row] + (1 - memory) * emitted[row]
        self._rounds += 1
        if self._rounds < self._trial:
            return
        if min(self._tokens[row] for row in active) >= self._cost:
            self._next_pause = _FIRST_PAUSE
        else:
            self._pause, self._rounds, self._trial = self._next_pause, 0, _RETRIAL
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
