"""What one call did, round by round; kept only where `generate(..., trace=True)` asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_dart.generation.walk import Accepted
from hf_dart.trees.tree import DraftTree


@dataclass(frozen=True)
class TracedRound:
    """One round, as Python numbers.

    Attributes:
        tokens, parents: [B][N] of the tree; a node without a parent is the root or empty.
        scores: [B][N] log-chance of each path as the drafter saw it; None for trees that were grown without.
        paths: per row the nodes that were committed, the root first; none for rows that stood still.
        seconds: wall time per phase.
    """

    tokens: list[list[int]]
    parents: list[list[int]]
    scores: list[list[float]] | None
    paths: list[list[int]]
    seconds: dict[str, float]


@dataclass
class Trace:
    """The rounds of one call, in order."""

    rounds: list[TracedRound] = field(default_factory=list)
    _spent: dict[str, float] = field(default_factory=dict)

    def add(self, tree: DraftTree, accepted: Accepted, seconds: dict[str, float]) -> None:
        """Keep a round.

        Args:
            tree: as it was verified.
            accepted: what was taken from it.
            seconds: per phase, of the call so far; the prefill's are no round's.
        """
        paths = accepted.path.tolist()
        spent = {name: total - self._spent.get(name, 0.0) for name, total in seconds.items() if name != "prefill"}
        self.rounds.append(
            TracedRound(
                tree.tokens.tolist(),
                tree.parents.tolist(),
                None if tree.scores is None else tree.scores.tolist(),
                [path[:count] for path, count in zip(paths, accepted.counts, strict=True)],
                spent,
            )
        )
        self._spent = dict(seconds)
