"""Draft trees grown on the host depth by depth, where what a token is worth depends on the whole path in front of it.

Opening one node at a time (`best_first`) would ask for one path's scores at a time. Here a beam of paths is scored at
once: what `tree.grow_tree` does in tensors, in NumPy, for which a small array costs a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from hf_dart.ngram.table import Array
from hf_dart.trees.best_first import Node
from hf_dart.trees.tree import FLOOR, STEP

PathScorer = Callable[[int, Array, Array], Array]
"""Of a depth, from 0, steps [W or 1, K] and the last tokens of W paths [W, C]: the steps behind those, [W, K]."""


@dataclass(frozen=True)
class PathDraft:
    """What one row may grow from.

    Attributes:
        history: [C] last committed tokens, the root at the end; as many as `score` looks at, one at least.
        candidates: [d, K] token ids per depth; -1 is no candidate.
        table: [d, J, K] log-score of candidate k behind candidate j of the depth before; J is 1 where the score
            does not depend on it.
        deepest: no node lies deeper.
        score: makes of them what they are behind a path.
        beam: W, paths per depth that are gone on with.
        copied: tokens that followed the same text earlier (`hf_dart.lookup`); where they lie within d, they are
            among the candidates.
        log_chance: log-probability of each copied token behind the one before.
    """

    history: Array
    candidates: Array
    table: Array
    deepest: int
    score: PathScorer
    beam: int
    copied: Sequence[int] = ()
    log_chance: float = -inf

    @property
    def root(self) -> int:
        """The last committed token."""
        return int(self.history[-1])

    def best(self, count: int) -> Iterator[Node]:
        """As `Growing.best`, of all that the beam extends to."""
        deepest = min(self.deepest, max(len(self.candidates), len(self.copied)))
        paths = self.history[None]  # [W, C] the last tokens of each path
        columns = np.zeros(1, dtype=np.int64)  # [W] which candidate each path ends in
        scores, places = np.zeros(1), np.full(1, -1)  # [W] of the paths, and where in the pool they lie
        pool: list[tuple[Array, Array, Array]] = []  # scores, tokens, places of parents
        size = 0
        for depth in range(deepest):
            tokens, steps = self._steps(depth, paths, columns)
            extended = (scores[:, None] + _bounded(np.where(tokens >= 0, steps, -inf))).ravel()
            parents = np.repeat(places, len(tokens))
            pool.append((extended, np.broadcast_to(tokens, (len(scores), len(tokens))).ravel(), parents))
            chosen = _largest(extended, self.beam)
            if not len(chosen):
                break
            rows = chosen // len(tokens)
            columns = chosen - rows * len(tokens)
            paths = np.concatenate([paths[rows, 1:], tokens[columns, None]], axis=1)
            scores, places = extended[chosen], chosen + size
            size += len(extended)
        return _unfolded(pool, count)

    def _steps(self, depth: int, paths: Array, columns: Array) -> tuple[Array, Array]:
        """Tokens [K] that may come at a depth, and what each is worth behind each path, [W, K]."""
        copied = self.copied[depth] if depth < len(self.copied) else None
        going_on = np.full(len(paths), copied is not None)
        if copied is not None and depth:
            going_on = paths[:, -1] == self.copied[depth - 1]
        if depth >= len(self.candidates):
            return np.array([copied]), np.where(going_on, self.log_chance, -inf)[:, None]
        tokens, table = self.candidates[depth], self.table[depth]
        steps = self.score(depth, table[columns] if len(table) > 1 else table, paths)
        if copied is not None:
            raised = (tokens == copied) & going_on[:, None]
            steps = np.where(raised, np.maximum(steps, self.log_chance), steps)
        return tokens, steps


def _bounded(steps: Array) -> Array:
    """As `tree.bounded`."""
    return np.where(steps > -inf, np.minimum(np.maximum(steps, FLOOR), -STEP), -inf)


def _largest(scores: Array, count: int) -> Array:
    """Places of the largest scores above -inf, `count` at most, by falling score."""
    count = min(count, int(np.count_nonzero(scores > -inf)))
    places = scores.argpartition(-count)[-count:] if 0 < count < len(scores) else np.arange(len(scores))
    return places[(-scores[places]).argsort(kind="stable")][:count]


def _unfolded(pool: list[tuple[Array, Array, Array]], count: int) -> Iterator[Node]:
    """The best nodes of a pool of scores, tokens and places of parents, in it."""
    if not pool:
        return
    scores, tokens, parents = (np.concatenate(parts) for parts in zip(*pool, strict=True))
    chosen = _largest(scores, count)
    place_of = {-1: 0}
    depths = [0]
    ranked = zip(*(part[chosen].tolist() for part in (scores, tokens, parents)), chosen.tolist(), strict=True)
    for number, (score, token, above, place) in enumerate(ranked, start=1):
        # Children lie below their parents, so that these come first.
        parent = place_of[above]
        place_of[place] = number
        depths.append(depths[parent] + 1)
        yield Node(token, parent, depths[-1], score)
