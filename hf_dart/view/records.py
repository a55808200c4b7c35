"""What is drawn: a call's figures and its rounds, as far as the pictures read them (`generate` returns them)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol


class Round(Protocol):
    """One verified round of B rows with trees of N nodes.

    Attributes:
        tokens, parents: [B][N] of the tree; a node without a parent is the root or empty.
        scores: [B][N] log-chance of each path as the drafter saw it; None for trees that were grown without.
        paths: per row the nodes that were committed, the root first; none for rows that stood still.
        seconds: wall time per phase.
    """

    @property
    def tokens(self) -> Sequence[Sequence[int]]: ...
    @property
    def parents(self) -> Sequence[Sequence[int]]: ...
    @property
    def scores(self) -> Sequence[Sequence[float]] | None: ...
    @property
    def paths(self) -> Sequence[Sequence[int]]: ...
    @property
    def seconds(self) -> Mapping[str, float]: ...


class Rounds(Protocol):
    """All rounds of a call, in order; `prompt_length` counts the prompt's slots, padding included."""

    @property
    def prompt_length(self) -> int: ...
    @property
    def rounds(self) -> Sequence[Round]: ...


class Figures(Protocol):
    """Counted over all rows of a call: `generate(..., return_dict_in_generate=True).draft_stats`.

    Attributes:
        rounds: target forwards that verified a tree; `plain_rounds` of them the root alone.
        row_rounds: `rounds`, counted once for every running row.
        tokens: that those rounds committed.
        drafted: tree nodes that were verified; `acceptance_rate` is the share of them that was accepted.
        accepted_per_depth: how often the node at depth 1, 2, ... was accepted.
        seconds: wall time per phase.
        trace: the rounds, where `trace=True` kept them.
    """

    @property
    def tau(self) -> float: ...
    @property
    def rounds(self) -> int: ...
    @property
    def plain_rounds(self) -> int: ...
    @property
    def row_rounds(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def drafted(self) -> int: ...
    @property
    def acceptance_rate(self) -> float: ...
    @property
    def accepted_per_depth(self) -> Sequence[int]: ...
    @property
    def seconds(self) -> Mapping[str, float]: ...
    @property
    def trace(self) -> Rounds | None: ...


def origins(tokens: int, committed: Iterable[int]) -> list[tuple[int, bool]]:
    """Of each of a row's generated tokens, its round (from 0; -1 for the prefill) and whether it was drafted.

    The prefill gives the first token; of every round all but the last (the bonus token) were drafted.

    Args:
        tokens: how many the row has.
        committed: tokens per round.
    """
    found = [(-1, False)]
    for number, count in enumerate(committed):
        found += [(number, True)] * (count - 1) + [(number, False)] * min(count, 1)
    return found[:tokens]
