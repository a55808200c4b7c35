"""Record of one call, round by round; kept only where `generate(..., trace=True)` asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hf_dart.decoding.walk import Accepted
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
    """The rounds of one call, in order.

    Attributes:
        prompt_length: slots of the prompt in `sequences`, padding included.
        rounds: each once.
    """

    prompt_length: int
    rounds: list[TracedRound] = field(default_factory=list)
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
        """Add a round to the record.

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
