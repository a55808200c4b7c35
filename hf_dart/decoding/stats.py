"""Statistics of one call, and as HTML: rounds, tokens, τ, acceptance, seconds per phase; if asked for, every round."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

from jinja2 import Template

from hf_dart.decoding.walk import Accepted
from hf_dart.trees.tree import DraftTree

PHASES = ("prefill", "noise", "draft", "grow", "verify", "walk", "commit")

# Other programs and threads take no part in it, so that costs measured on a busy machine hold. Windows counts in
# steps of 16 ms, which are longer than a round.
processor_time = perf_counter if sys.platform == "win32" else thread_time

_PAGE = Path(__file__).with_name("stats.html")


@dataclass(frozen=True)
class TracedRound:
    """One round, as Python numbers."""

    tokens: list[list[int]]  # [B][N] of the tree
    parents: list[list[int]]  # [B][N]; a node without one is the root or empty
    scores: list[list[float]] | None  # [B][N] log-chance of each path as the drafter saw it; None without one
    paths: list[list[int]]  # per row the nodes that were committed, the root first; none for rows that stood still
    seconds: dict[str, float]  # wall time per phase


@dataclass
class Trace:
    """The rounds of one call, in order."""

    prompt_length: int  # slots of the prompt in `sequences`, padding included
    rounds: list[TracedRound] = field(default_factory=list)  # each once
    _spent: dict[str, float] = field(default_factory=dict)

    def end(self, tokens: int) -> None:
        """Cut what rows committed after `tokens` generated ones, as `sequences` are cut.

        A row may be ahead when another one ends the call.
        """
        room = None
        for number, one in enumerate(self.rounds):
            room = room or [tokens - 1] * len(one.paths)  # one is the prefill's
            paths = [path[: max(left, 0)] for path, left in zip(one.paths, room, strict=True)]
            room = [left - len(path) for path, left in zip(paths, room, strict=True)]
            self.rounds[number] = replace(one, paths=paths)

    def add(self, tree: DraftTree, accepted: Accepted, seconds: dict[str, float]) -> None:
        """Add a round to the record, by the seconds of each phase so far; the prefill's are no round's."""
        paths = zip(accepted.path.tolist(), accepted.counts, strict=True)
        committed = [path[:count] for path, count in paths]
        scores = None if tree.scores is None else tree.scores.tolist()
        spent = {name: total - self._spent.get(name, 0.0) for name, total in seconds.items() if name != "prefill"}
        self.rounds.append(TracedRound(tree.tokens.tolist(), tree.parents.tolist(), scores, committed, spent))
        self._spent = dict(seconds)


@dataclass
class DraftStats:
    """Statistics of one `generate` call, counted over all its rows: rounds, tokens, acceptance, time.

    Attributes:
        rounds: target forwards that verified a tree (the prefill is not one).
        plain_rounds: those of them that verified the root alone, no node being worth its cost.
        paused_rounds: those that were not drafted, copied text alone being worth more, or drafts not asked for.
        row_rounds: `rounds`, counted once for every row that was still running.
        tokens: tokens that those rounds committed, bonus tokens included (the prefill's own token is not).
        drafted: tree nodes that were verified, roots and empty ones excluded.
        accepted_per_depth: how often the node at depth 1, 2, ... was accepted.
        committed: tokens that each row committed, round by round; all but the last of a round were drafted.
        seconds: wall time per phase; "noise" is the drawing of the random numbers that tokens are sampled with. On an
            accelerator a phase ends when its work is launched, and waiting falls to the first phase that reads a
            result.
        processor_seconds: processor time of the calling thread per phase, by which `decoding.pace` measures costs.
            Time in a phase that is entered within another is no time of that other one.
        trace: every round with its tree, where `generate(..., trace=True)` asked for it.
    """

    rounds: int = 0
    plain_rounds: int = 0
    paused_rounds: int = 0
    row_rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    committed: list[list[int]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    processor_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0), repr=False)
    trace: Trace | None = None
    _phases: tuple[float, float] = field(default=(0.0, 0.0), init=False, repr=False)  # wall and processor time in all

    @property
    def _counts(self) -> dict[str, int]:
        """Fields that are whole numbers."""
        return {name: count for name, count in vars(self).items() if isinstance(count, int)}

    @property
    def tau(self) -> float:
        """Tokens committed per target forward and row, bonus included."""
        return self.tokens / self.row_rounds if self.row_rounds else 0.0

    @property
    def accepted(self) -> int:
        """Drafted tokens that the target confirmed."""
        return sum(self.accepted_per_depth)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; a wide tree lowers it while it raises τ."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `seconds[name]` and `processor_seconds[name]`."""
        wall, processor = perf_counter() - self._phases[0], processor_time() - self._phases[1]  # outside of all phases
        try:
            yield
        finally:
            wall, processor = perf_counter() - self._phases[0] - wall, processor_time() - self._phases[1] - processor
            self._phases = self._phases[0] + wall, self._phases[1] + processor
            self.seconds[name] += wall
            self.processor_seconds[name] += processor

    def count(self, emitted: list[int], nodes: list[int], drafted: bool = True) -> None:
        """Add one round to the counts: the tokens of each row, of which all but the last were drafted.

        Rows with none took no part; `nodes` are those of each row's tree that were drafted.
        """
        self.rounds += 1
        self.plain_rounds += not any(nodes)
        self.paused_rounds += not drafted
        self.committed.append(emitted)
        for tokens, count in zip(emitted, nodes, strict=True):
            if tokens:
                self.row_rounds += 1
                self.tokens += tokens
                self.drafted += count
                self._accept([1] * (tokens - 1))

    def merge(self, other: DraftStats) -> None:
        """Add the counts and times of another call."""
        for name, count in other._counts.items():
            setattr(self, name, getattr(self, name) + count)
        self._accept(other.accepted_per_depth)
        self.committed += other.committed
        self.add_times(other)

    def add_times(self, other: DraftStats, share: float = 1.0) -> None:
        """Add a share of the times of others, such as a round of several calls."""
        for name, seconds in other.seconds.items():
            self.seconds[name] += share * seconds
            self.processor_seconds[name] += share * other.processor_seconds[name]

    def _accept(self, per_depth: list[int]) -> None:
        self.accepted_per_depth += [0] * (len(per_depth) - len(self.accepted_per_depth))
        for depth, count in enumerate(per_depth):
            self.accepted_per_depth[depth] += count

    def _repr_html_(self) -> str:
        """Return the statistics as HTML, for notebooks: what drafts did, which depths were accepted, time by phase."""
        return Template(_PAGE.read_text(encoding="utf8"), autoescape=True, keep_trailing_newline=True).render(
            stats=self
        )

    def to_dict(self) -> dict[str, Any]:
        """All figures but those of single rounds, as numbers, lists and dicts that JSON takes."""
        return {
            **self._counts,
            **{name: getattr(self, name) for name in ("tau", "accepted", "acceptance_rate")},
            "accepted_per_depth": list(self.accepted_per_depth),
            "seconds": dict(self.seconds),
        }
