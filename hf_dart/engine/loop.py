"""The host's part: launch rounds, and read the tokens of each while the next one runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_dart.decoding.rows import Rows, Streaming
from hf_dart.decoding.session import Session
from hf_dart.decoding.stats import DraftStats
from hf_dart.decoding.walk import check_token
from hf_dart.engine.state import RING
from hf_dart.engine.tier import Tier


class Reports:
    """The ring's way to the host: copied when a round is done, waited for when it is read."""

    def __init__(self, ring: Tensor) -> None:
        self._ring = ring
        self._on_host = ring
        self._copied: list[torch.cuda.Event] = []
        if ring.is_cuda:
            self._on_host = torch.empty(ring.shape, dtype=ring.dtype, pin_memory=True)
            self._copied = [torch.cuda.Event() for _ in range(RING)]

    def send(self, number: int) -> None:
        """To be called after the launch of round `number`, counted from 0."""
        place = number % RING
        if self._copied:
            self._on_host[place].copy_(self._ring[place], non_blocking=True)
            self._copied[place].record(torch.cuda.current_stream(self._ring.device))

    def receive(self, number: int) -> list[list[int]]:
        """The tokens that each row emitted in round `number`."""
        place = number % RING
        if self._copied:
            self._copied[place].synchronize()
        return [row[: row[-1]] for row in self._on_host[place].tolist()]


def run(
    tier: Tier,
    session: Session,
    lengths: list[int],
    lag: int,
    leaves: Callable[[list[tuple[int, int]]], bool],
) -> Exception | None:
    """Rounds in one tier, until all rows have ended, one of them might outgrow it, or another one is better.

    Args:
        tier: loaded with the session.
        session: whose text grows.
        lengths: committed entries of each row.
        leaves: is another tier better for running rows of such lengths, which may emit so many tokens more?
        lag: rounds that are launched before the first of them is read. With 1, a device is never idle while the host
            reads; the last round then is one that changes nothing.

    Returns:
        Why a round could not be launched, if one could not; all that were launched before are read.
    """
    rows, stats, noise = session.rows, session.stats, session.noise
    reports, starts = Reports(tier.state.ring), list(rows.emitted)
    launched = read = idle = 0
    failure: Exception | None = None
    ran: list[bool] = []  # in the last round that did something
    try:
        while True:
            waiting = launched - read
            running = _running(rows, lengths)
            goes_on = failure is None and bool(running)
            if goes_on and waiting <= lag and tier.has_room(running, waiting + 1) and not leaves(running):
                if noise is not None:
                    tier.supply(noise, rows)
                try:
                    tier.launch()
                except Exception as error:
                    failure = error
                    continue
                reports.send(launched)
                launched += 1
            elif waiting:
                emitted = tier.of_call(reports.receive(read), len(rows))
                read += 1
                if rows.finished:
                    stats.count_idle(ran)
                else:
                    ran = [room > 0 for room in rows.rooms]
                    # A round that was launched before the noise of the one in front was counted may find none left; one
                    # after it, never.
                    idle = 0 if any(emitted) else idle + 1
                    if idle > lag:
                        failure = failure or RuntimeError("a round brought no token")
                    _take(emitted, rows, session.streaming, stats, tier.shape.drafted)
                    lengths = [length + len(tokens) for length, tokens in zip(lengths, emitted, strict=True)]
            else:
                return failure
    finally:
        rows.write(starts)


def _running(rows: Rows, lengths: list[int]) -> list[tuple[int, int]]:
    """Committed entries and room of the rows that may still emit something; others may stand beyond the tier's end."""
    if rows.finished:
        return []
    return [(length, room) for length, room in zip(lengths, rows.rooms, strict=True) if room > 0]


def _take(emitted: list[list[int]], rows: Rows, streaming: Streaming, stats: DraftStats, nodes: int) -> None:
    # Rows that wait for slower ones emit nothing, and take no part.
    limits = [room if tokens else 0 for tokens, room in zip(emitted, rows.rooms, strict=True)]
    for row, tokens in enumerate(emitted):
        for token in tokens:
            check_token(token)
            rows.note(row, token)
            streaming.send()
    stats.count([len(tokens) for tokens in emitted], limits, nodes)
