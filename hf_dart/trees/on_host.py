"""Draft trees grown on the host, the best nodes first.

A node's score is the log-chance that the text goes on along the path to it (DART, arXiv 2601.19278, section 3.3;
OPT-Tree and DDTree pose the same problem). Children score below their parents, so that one queue of what may come next
yields the nodes in the order of their scores, and few others are looked at. Width 1 gives a chain. On the host a tree
can be no larger than its nodes are worth, and the search ends where no further one can be.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from math import exp, inf

import numpy as np

from hf_dart.trees.costs import RoundCost
from hf_dart.trees.scores import Candidates, Scorer
from hf_dart.trees.tree import Branches, DraftTree

_CHECKED = 4  # nodes, after each of which it is seen whether more may pay
_OFF = -2  # in the place of a copied node: the path is not one of copied text

_Choices = list[tuple[float, int, int]]
"""What may come after a path, the likeliest first: log-probability without its sign, column of the depth, token."""

_Copied = dict[int, tuple[float, int]]
"""What was copied after a path, by token: its log-probability, and its place among the copied nodes."""


def grow_on_host(
    candidates: Candidates,
    *,
    nodes: int,  # most of each row, the root included
    beam: int | None = None,  # most paths of each depth that go on; None for any number
    cost: RoundCost | None = None,  # of the round; None grows to `nodes`
    weights: Sequence[float] | None = None,  # of a token more in each row, beside 1 that each round brings; None: mean
) -> DraftTree:
    """Grow one tree per row on the CPU, all of one size N <= `nodes`; rows that have fewer nodes have empty ones.

    The size is the one at which the tokens expected of the round, over its cost, are most; and so is the number of
    levels, where these have a cost of their own.
    """
    batch, roots = len(candidates.history), [text[-1] for text in candidates.history]
    deepest = max((candidates.tokens.shape[1], *(depth for one in candidates.copies for depth in one.depths)))
    bounds = range(1, deepest + 1) if cost is not None and cost.level else [deepest]
    shares = [1 / batch] * batch if weights is None else weights
    with np.errstate(divide="ignore", invalid="ignore"):  # logarithms of missing candidates
        score, found = candidates.formula.scorer(candidates.tokens, candidates.steps), []
        for bound in bounds:
            rows = [_Search(candidates, row, score, bound, beam or nodes) for row in range(batch)]
            found.append((*_best_size(rows, nodes, shares, cost), rows))
    _, size, best = max(found, key=lambda one: one[0])
    return DraftTree.of(roots, [row.found for row in best], size)


def _best_size(
    rows: Sequence[_Search], nodes: int, shares: Sequence[float], cost: RoundCost | None
) -> tuple[float, int]:
    """Find nodes until no more may pay, or there are no more; return the tokens per cost at best, and the size then.

    The size is the number of nodes below each root; without a cost, it is that of all.
    """
    expected, levels = 1.0, 0
    best = (1.0 if cost is None else expected / cost.of(1)), 0
    for size in range(1, nodes):
        gain = sum(share * row.next_chance() for row, share in zip(rows, shares, strict=True))
        if not gain:
            break
        expected += gain
        if cost is None:
            best = expected, size
            continue
        levels = max(levels, *(row.found.depths[-1] for row in rows if row.found))
        best = max(best, (expected / cost.of(1 + size, levels), size))
        if size % _CHECKED == 0 and not cost.may_pay(size, expected, gain, best[0]):
            break
    return best


class _Search:
    """Search for the nodes of one row, the best ones first; `found` has them in their order."""

    def __init__(self, candidates: Candidates, row: int, score: Scorer, deepest: int, beam: int) -> None:
        self.found = Branches([], [], [], [])
        self._row, self._score, self._beam = row, score, beam
        self._history, self._ends = candidates.history[row], candidates.ends[row]
        self._tokens = candidates.tokens[row].tolist()
        self._context, self._pairs = candidates.formula.context, candidates.steps.shape[2] > 1
        self._deepest = min(deepest, candidates.deepest[row])
        self._copied = defaultdict[int, _Copied](dict)  # after each copied node, and after the root at -1
        copies = candidates.copies[row]
        for node, (token, parent, total) in enumerate(zip(copies.tokens, copies.parents, copies.totals, strict=True)):
            self._copied[parent][token] = total - (copies.totals[parent] if parent >= 0 else 0.0), node
        self._known: dict[tuple[int, int], _Choices] = {}  # by depth and column, where they depend on nothing else
        # By the score without its sign: a number that tells equal ones apart, the parent and its score, and which of
        # the choices after it is meant.
        self._waiting: list[tuple[float, int, int, float, int, _Choices, _Copied]] = []
        self._numbers = count()
        self._going_on = Counter[int]()  # paths of each depth
        if self._deepest > 0:
            self._go_on(-1, 0.0, 0, -1)

    def next_chance(self) -> float:
        """Find one node more, and return the chance that the text comes to it; 0 if there is none."""
        if not self._waiting:
            return 0.0
        less, _, parent, above, at, choices, copied = heappop(self._waiting)
        self._wait(parent, above, at + 1, choices, copied)
        _, column, token = choices[at]
        found, node = self.found, len(self.found)
        depth = 1 + (found.depths[parent] if parent >= 0 else 0)
        found.tokens.append(token)
        found.parents.append(parent)
        found.depths.append(depth)
        found.totals.append(-less)
        drafted = depth <= len(self._tokens)
        if depth < self._deepest and token not in self._ends and not (drafted and self._going_on[depth] >= self._beam):
            self._going_on[depth] += 1
            self._go_on(node, less, column, copied[token][1] if token in copied else _OFF)
        return exp(-less)

    def _go_on(self, node: int, less: float, column: int, copy: int) -> None:
        """Let what may come after a node wait for its turn."""
        depth, copied = self.found.depths[node] if node >= 0 else 0, self._copied.get(copy, {})
        if depth >= len(self._tokens):
            choices = sorted((-step, 0, token) for token, (step, _) in copied.items())
        else:
            place = depth, column if self._pairs else 0
            known = self._known.get(place)
            if known is None:
                steps = self._score(self._row, depth, column, self._text(node))
                known = sorted(zip((-steps).tolist(), count(), self._tokens[depth], strict=False))
                if not self._context:
                    self._known[place] = known
            choices = known
            if copied:
                joined = ((min(less, -copied.get(token, (-inf,))[0]), at, token) for less, at, token in known)
                choices = sorted(joined)
        self._wait(node, less, 0, choices, copied)

    def _wait(self, parent: int, above: float, at: int, choices: _Choices, copied: _Copied) -> None:
        if at < len(choices) and choices[at][0] < inf:
            heappush(self._waiting, (above + choices[at][0], next(self._numbers), parent, above, at, choices, copied))

    def _text(self, node: int) -> list[int]:
        """Return as many last tokens up to a node as scores look at."""
        path = list[int]()
        while node >= 0 and len(path) < self._context:
            path.append(self.found.tokens[node])
            node = self.found.parents[node]
        return [*self._history, *reversed(path)][-self._context :]
