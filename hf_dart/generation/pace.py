"""When drafting does not pay, it pauses: only copied text is verified then, and drafts are tried again later."""

from __future__ import annotations

from hf_dart.configuration import TreeConfig

_TRIAL, _RETRIAL = 8, 4  # drafted rounds before drafting is judged: at first, and after every pause
_MEMORY = 0.9  # weight of what is known against the newest round
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 256  # rounds


class Pace:
    """Weighs what drafts bring against `TreeConfig.draft_cost` and `node_cost`, over the rounds of one call.

    Costs are given, not timed: equal calls make equal rounds, also where rounding depends on their shape.
    """

    def __init__(self, config: TreeConfig, device_type: str) -> None:
        self._config, self._device = config, device_type
        self._gain = 0.0  # running mean of tokens per row, less what the round cost in rounds without drafts
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
        rows = sum(limit > 0 for limit in limits)
        cost = self._config.round_cost(rows, self._device).of(nodes)
        memory = min(_MEMORY, self._rounds / (self._rounds + 1))
        self._gain = memory * self._gain + (1 - memory) * (sum(emitted) / rows - cost)
        self._rounds += 1
        if self._rounds < self._trial:
            return
        if self._gain >= 0:
            self._next_pause = _FIRST_PAUSE
        else:
            self._pause, self._rounds, self._trial = self._next_pause, 0, _RETRIAL
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
