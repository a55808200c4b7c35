"""Copies of earlier text: what followed earlier occurrences of a text's end, as a tree of draft tokens.

Prompt lookup decoding (Saxena, 2023; stock's `prompt_lookup_num_tokens`) drafts what followed one of them. Here several
make a tree, and its nodes compete with the drafter's, by how often such copies were right: by the length of the match,
and by whether the occurrences agree. Where there is a memory (`hf_dart.decoding.suffix_store`), texts of earlier calls
are copied, too. Suffix decoding (arXiv 2411.04975) keeps such texts in a suffix tree; here each token takes 20 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import inf, log
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dart.trees.costs import Array, RoundCost
from hf_dart.trees.tree import STEP, DraftTree

KEYS = (1, 3)  # lengths of the runs of tokens that places are found by
LONGEST = 32  # matches are not told apart beyond this length
TRIED = 16  # places that are compared, the latest ones
NODES = 24  # of the tree of one row
_WORTH = 0.03  # least chance of a copied token that is proposed, its whole path counted
_SHORTER = 0.25  # weight of a place whose match is one token shorter
_OWN = 2.0  # weight of a place in the running text, beside one in the memory
_AGREE = 0.9  # places agree on a token that has this share of their weight
_AT_ONCE = 12  # tokens from which on NumPy adds them sooner than Python
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # hashes are polynomials modulo 2^64
_LAST_PLACE = 2**31 - 1

# A copied token with share s of the weight of all places is right with chance s * c. c before anything was seen, by the
# length of the match with the copied tokens before it: 1, 2, 3, 4, 5-7, 8-15, 16-31, 32 and more; per source, for a
# token of one place, for one that places do not agree on, and for one that several agree on. Estimates from replays of
# texts; what calls and memories see corrects them (`CopyCounts`).
_LENGTHS = (2, 3, 4, 5, 8, 16, LONGEST)
PRIOR = (
    *(0.30, 0.45, 0.55, 0.65, 0.68, 0.77, 0.85, 0.88),  # the running text
    *(0.47, 0.58, 0.60, 0.60, 0.50, 0.60, 0.60, 0.80),
    *(0.72, 0.82, 0.88, 0.93, 0.92, 0.94, 0.97, 0.98),
    *(0.12, 0.45, 0.60, 0.65, 0.75, 0.85, 0.80, 0.90),  # the memory
    *(0.25, 0.50, 0.60, 0.60, 0.60, 0.50, 0.60, 0.80),
    *(0.35, 0.70, 0.85, 0.87, 0.90, 0.96, 0.97, 0.99),
)
_ONE, _DISAGREE, _SEVERAL = (kind * 8 for kind in range(3))
_SOURCE = 24  # cells of one source
_CELL = [sum(length >= bound for bound in _LENGTHS) for length in range(2 * LONGEST)]
_WEIGHT = 8.0  # copied tokens of each cell that the chances at the beginning of a call are worth
_MOST_SEEN = 1000.0  # copied tokens of a cell that are counted; earlier ones count less


@dataclass
class CopyCounts:
    """Counts [cells] of copied tokens that were right, of those `seen`; at first as if `PRIOR` came from a few."""

    right: Array = field(default_factory=lambda: _WEIGHT * np.array(PRIOR))
    seen: Array = field(default_factory=lambda: np.full(len(PRIOR), _WEIGHT))

    def chances(self) -> list[float]:
        """Return c of each cell, by what was right so far."""
        return (self.right / self.seen).tolist()

    def add(self, right: Sequence[float], seen: Sequence[float]) -> None:
        """Count the copied tokens of one row, by cell."""
        self.right, self.seen = self.right + right, self.seen + seen
        fades = np.minimum(1.0, _MOST_SEEN / self.seen)
        self.right, self.seen = self.right * fades, self.seen * fades


@dataclass(frozen=True)
class Copies:
    """Tree of copied tokens after one row's text, the likeliest nodes first."""

    tokens: list[int]  # of each node
    parents: list[int]  # place of its parent among the nodes; -1 for the text's end
    depths: list[int]  # 1 for the first after the text
    totals: list[float]  # log-probability that the text goes on along the whole path to the node

    def __len__(self) -> int:
        return len(self.tokens)

    def only(self, nodes: Sequence[int]) -> Copies:
        """Return the tree of `nodes`, in their order, among which are the parents of all."""
        place = {-1: -1} | {node: number for number, node in enumerate(nodes)}
        return Copies(
            [self.tokens[node] for node in nodes],
            [place[self.parents[node]] for node in nodes],
            [self.depths[node] for node in nodes],
            [self.totals[node] for node in nodes],
        )

    def right(self, depth: int, nodes: int) -> Array:
        """[`depth`] chance that the text is on a path of the first `nodes` nodes at each depth."""
        chances = np.exp(self.totals[:nodes])
        return np.bincount(np.array(self.depths[:nodes], np.int64), chances, depth + 1)[1 : depth + 1]

    def accepted(self, came: Sequence[int], nodes: int) -> int | None:
        """Return how many of the tokens that came lie on a path of the first `nodes` nodes; None if all do."""
        places = zip(self.parents[:nodes], self.tokens[:nodes], strict=True)
        children = {place: node for node, place in enumerate(places)}
        above = -1
        for place, token in enumerate(came):
            if (above, token) not in children:
                return place
            above = children[above, token]
        return None


NOTHING = Copies([], [], [], [])


def best_size(copies: Sequence[Copies], weights: Sequence[float], cost: RoundCost) -> tuple[int, float, float]:
    """Nodes below each root at which a round of copies alone brings most for its cost, 0 to N - 1; its tokens and cost.

    The tokens are those expected to bring the batch on: 1 in every round, and each node's by the weight of its row.
    """
    most = min(max(map(len, copies)), len(cost.verify) - 1)
    gains, levels = np.zeros(most), np.zeros(most)
    for weight, one in zip(weights, copies, strict=True):
        size = min(len(one), most)
        gains[:size] += weight * np.exp(one.totals[:size])
        levels[:size] = np.maximum(levels[:size], one.depths[:size])
    return cost.best_size(gains, np.maximum.accumulate(levels))


def tree_of_copies(roots: Sequence[int], copies: Sequence[Copies], nodes: int) -> DraftTree:
    """Trees of the first `nodes` copies of each row below its root [B]; rows that have fewer have empty nodes."""
    tokens, parents, totals = list[list[int]](), list[list[int]](), list[list[float]]()
    for root, one in zip(roots, copies, strict=True):
        empty = max(nodes - len(one), 0)
        tokens.append([root, *one.tokens[:nodes], *[root] * empty])
        parents.append([-1, *(parent + 1 for parent in one.parents[:nodes]), *[-1] * empty])
        totals.append([0.0, *one.totals[:nodes], *[-inf] * empty])
    return DraftTree.from_parents(
        torch.tensor(tokens), torch.tensor(parents), torch.tensor(totals, dtype=torch.float64)
    )


@dataclass(frozen=True)
class CopyLevels:
    """Copies of B rows in T columns, depth by depth."""

    tokens: Array  # [B, T]; -1 where a row has no node
    parents: Array  # [B, T] column of each node's parent; -1 for those after the text, and -3 where there is no node
    totals: Array  # [B, T] log-probability of the path to each node; -inf where there is no node
    depths: Array  # [T] of the columns, rising from 1 on
    ends: Sequence[int]  # [L + 1] number of columns of nodes at most 0, 1, ..., L deep

    @classmethod
    def of(cls, copies: Sequence[Copies]) -> CopyLevels:
        """Lay out the copies of each row."""
        levels = range(1 + max((depth for one in copies for depth in one.depths), default=0))
        width = [max(one.depths.count(depth) for one in copies) for depth in levels]
        ends = [*accumulate(width)]
        tokens, parents = (np.full((len(copies), ends[-1]), none) for none in (-1, -3))
        totals = np.full(tokens.shape, -inf)
        for row, one in enumerate(copies):
            free, columns = ends[:-1], list[int]()
            for parent, depth in zip(one.parents, one.depths, strict=True):
                column = free[depth - 1]
                free[depth - 1] += 1
                parents[row, column] = columns[parent] if parent >= 0 else -1
                columns.append(column)
            tokens[row, columns], totals[row, columns] = one.tokens, one.totals
        return cls(tokens, parents, totals, np.arange(len(width)).repeat(width), ends)

    @property
    def steps(self) -> Array:
        """[B, T] log-probability of each node after its parent."""
        if not self.totals.size:
            return self.totals
        above = np.take_along_axis(self.totals, self.parents.clip(0), axis=1)
        with np.errstate(invalid="ignore"):
            return np.where(self.parents >= 0, self.totals - above, self.totals)

    def above(self, depth: int) -> Array:
        """[B, T'] columns of the ancestors at `depth`, -1 for the text's end, of the nodes that are deeper."""
        found = self.parents[:, self.ends[min(depth, len(self.ends) - 1)] :].copy()
        while (later := found >= self.ends[min(depth, len(self.ends) - 1)]).any():
            found = np.where(later, np.take_along_axis(self.parents, found.clip(0), axis=1), found)
        return found

    def by_depth(self, depth: int) -> Array:
        """[B, `depth`, C] the tokens of each depth, each once; -1 is none."""
        levels = [self.tokens[:, start:end] for start, end in pairwise(self.ends[: depth + 1])]
        found = np.full((len(self.tokens), depth, max((level.shape[1] for level in levels), default=0)), -1)
        for here, level in zip(found.swapaxes(0, 1), levels, strict=False):
            again = (level[:, :, None] == level[:, None]) & np.tri(level.shape[1], k=-1, dtype=bool)
            here[:, : level.shape[1]] = np.where(again.any(2), -1, level)
        return found


def with_copies(candidates: Tensor, scores: Tensor, copied: Tensor) -> tuple[Tensor, Tensor]:
    """Add copied tokens [B, d, C], -1 for none, to candidates [B, d, K] and their scores, if they are not among them.

    What is added scores -inf.
    """
    known = (candidates[:, :, None] == copied[..., None]).any(-1)
    more = torch.where(known, -1, copied)
    scores = torch.nn.functional.pad(scores, (0, copied.shape[-1]), value=-inf)
    return torch.cat([candidates, more], dim=-1), scores


class TextIndex:
    """Texts in a ring of tokens, the latest in place of the oldest, and where each run of `KEYS` tokens occurs.

    Chains of places as in zlib: `head[hash of the run]` is the latest place after such a run, `prev[place]` the one
    before. Tokens are numbers above 0; 0 ends a text. `capacity` is the most that are held.
    """

    BYTES = 8 + 6 * len(KEYS)
    """Most bytes that a token takes, its places in the index counted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._shift = 65 - (capacity // 2).bit_length()
        self.tokens = np.zeros(capacity, np.int64)
        self._prev = [np.zeros(capacity, np.int32) for _ in KEYS]
        self._head = [np.zeros(1 << (64 - self._shift), np.int32) for _ in KEYS]
        views: Callable[[Any], Any] = memoryview  # Python reads single numbers sooner from these
        self._view = views(self.tokens)
        self._chains = [(views(prev), views(head)) for prev, head in zip(self._prev, self._head, strict=True)]
        self.end = 1  # place after the last token

    def add(self, tokens: Sequence[int] | Array) -> None:
        """Add tokens [n] after the last one, of which the last `capacity` stay."""
        if len(tokens) < _AT_ONCE:
            for token in tokens:
                self.append(int(token))
            return
        tokens = np.asarray(tokens, np.int64)
        for start in range(0, len(tokens), self.capacity // 2):
            self._extend(tokens[start : start + self.capacity // 2])

    def append(self, token: int) -> None:
        """Add one token."""
        if self.end >= _LAST_PLACE:
            self._renumber()
        self._view[self.end % self.capacity] = token
        self.end = end = self.end + 1
        for key, (prev, head) in zip(KEYS, self._chains, strict=True):
            slot = self._slot([self._view[place % self.capacity] for place in range(end - key, end)])
            prev[end % self.capacity], head[slot] = head[slot], end

    def _extend(self, tokens: Array) -> None:
        """Add tokens [n] as `append` does one by one."""
        if self.end + len(tokens) > _LAST_PLACE:
            self._renumber()
        places = np.arange(self.end + 1, self.end + 1 + len(tokens))  # after each of the tokens
        self.tokens[(places - 1) % self.capacity] = tokens
        self.end = int(places[-1])
        for key, prev, head in zip(KEYS, self._prev, self._head, strict=True):
            hashes = np.zeros(len(tokens), np.uint64)
            for before in range(key, 0, -1):
                hashes = (hashes + self.tokens[(places - before) % self.capacity].view(np.uint64)) * np.uint64(_FACTOR)
            hashes >>= np.uint64(self._shift)
            order = hashes.argsort(kind="stable")
            slots, at = hashes[order], places[order].astype(np.int32)
            same = slots[1:] == slots[:-1]
            latest = head[slots]
            latest[1:][same] = at[:-1][same]
            prev[at % self.capacity] = latest
            last = np.append(~same, True)
            head[slots[last]] = at[last]

    def _renumber(self) -> None:
        """Make place numbers small again; what lies where in the ring stays."""
        less = (self.end // self.capacity - 1) * self.capacity
        self.end -= less
        for places in (*self._prev, *self._head):
            np.maximum(places - less, 0, out=places)

    def _slot(self, run: Sequence[int]) -> int:
        value = 0
        for token in run:
            value = (value + token) * _FACTOR & _MASK
        return value >> self._shift

    def matches(self, ending: Sequence[int], depth: int) -> tuple[list[list[int]], list[int]]:
        """Return `depth` tokens that followed the latest occurrences of the end of a text, and the matches' lengths.

        From the end of this index on they are those after the match once more, as in a text that has begun to loop;
        tokens after a 0 mean nothing. `ending` has at most `LONGEST` tokens.
        """
        places, lengths = self.find(ending)
        if not len(places):
            return [], []
        ahead = np.arange(depth) % (self.end - places[:, None])
        return self.tokens[(places[:, None] + ahead) % self.capacity].tolist(), lengths.tolist()

    def find(self, ending: Sequence[int]) -> tuple[Array, Array]:
        """Places [n] after the latest occurrences of the end of a text, and the lengths [n] of their matches."""
        oldest, found = max(self.end - self.capacity + LONGEST, 1), set[int]()
        for key, (prev, head) in zip(reversed(KEYS), reversed(self._chains), strict=True):
            if len(found) >= TRIED:
                break
            if len(ending) < key:
                continue
            at = head[self._slot(ending[-key:])]
            for _ in range(TRIED + 1):
                if at < oldest:
                    break
                if at < self.end:  # else the text's own end
                    found.add(at)
                at = prev[at % self.capacity]
        places = np.array(sorted(found, reverse=True), np.int64)
        if not found:
            return places, places
        same = self.tokens[(places[:, None] - np.arange(1, len(ending) + 1)) % self.capacity] == ending[::-1]
        lengths = np.where(same.all(1), len(ending), same.argmin(1))
        return places[lengths > 0], lengths[lengths > 0]


class RowCopies:
    """Copies after one row's text: from the text itself and, where there is one, from a memory.

    The text is a shared list of token ids, which grows from outside; a memory is a `decoding.suffix_store.Namespace`.
    `chances` are c of each cell at first; None for the memory's, or without one for `PRIOR`. Ids from `size` on, which
    have no logit, are not copied.
    """

    def __init__(
        self, text: list[int], memory: Any = None, chances: Sequence[float] | None = None, size: float = inf
    ) -> None:
        self._text, self._memory = text, memory
        self._base = 1 + (0 if memory is None else memory.base)
        self._end, self._indexed = size + self._base, 0
        self._new_index()
        self._proposed, self._cells, self._asked_at = NOTHING, list[tuple[int, float]](), 0
        known = PRIOR if memory is None else memory.chances()
        self._prior = known if chances is None else chances
        self.right, self.seen = [0.0] * len(PRIOR), [0.0] * len(PRIOR)

    def suggest(self, depth: int, ends: Collection[int] = ()) -> Copies:
        """Return copies after the text, at most `depth` deep; none after a token of `ends`."""
        self.learn()
        if len(self._text) + LONGEST >= self._index.capacity:
            self._new_index()
        self._index.add([token + self._base for token in self._text[self._indexed :]])
        self._indexed = len(self._text)
        ending = [token + self._base for token in self._text[-LONGEST:]]
        rows, lengths = self._index.matches(ending, depth)
        sources = [0] * len(rows)
        if self._memory is not None:
            more, longer = self._memory.matches(ending, depth)
            rows, lengths, sources = rows + more, lengths + longer, sources + [_SOURCE] * len(more)
        self._asked_at = len(self._text)
        self._proposed = self._grown(rows, lengths, sources, depth, {end + self._base for end in ends})
        return self._proposed

    def _new_index(self) -> None:
        """Begin an index with room for the text to grow."""
        self._index, self._indexed = TextIndex(max(1024, 2 * (len(self._text) + LONGEST))), 0

    def _grown(
        self, rows: list[list[int]], lengths: list[int], sources: list[int], depth: int, ends: Collection[int]
    ) -> Copies:
        """Return the likeliest nodes of the tree of what followed at several places (`TextIndex.matches`).

        `sources` are the first cells of each place's source.
        """
        found = Copies([], [], [], [])
        self._cells = cells = []
        # In the order of their tokens, those that share a path stand side by side, and agree if the first and last do.
        order = sorted(range(len(rows)), key=rows.__getitem__)
        longest = max(lengths, default=0)
        weights = [_SHORTER ** (longest - lengths[row]) * (1.0 if sources[row] else _OWN) for row in order]
        rows, before = [rows[row] for row in order], [0.0, *accumulate(weights)]
        # The longest match counts, the text's own before the memory's.
        ranks = [(lengths[row], -sources[row]) for row in order]
        waiting: list[tuple[float, int, int, int, int, int, int, float]] = []
        number = 0

        def branch(parent: int, total: float, level: int, first: int, last: int) -> None:
            nonlocal number
            whole = before[last + 1] - before[first]
            while first <= last:
                token, end = rows[first][level], last
                while rows[end][level] != token:
                    end -= 1
                if 0 < token < self._end:
                    share = (before[end + 1] - before[first]) / whole
                    length, source = ranks[first] if end == first else max(ranks[first : end + 1])
                    kind = _DISAGREE if share < _AGREE else _ONE if end == first else _SEVERAL
                    cell = kind - source + _CELL[length + level]
                    right, seen = self._prior[cell] * _WEIGHT + self.right[cell], _WEIGHT + self.seen[cell]
                    chance = min(share * min(right / seen, 1.0), 1 - STEP)
                    likely = total + log(chance) if chance > _WORTH else -inf
                    if likely > log(_WORTH):
                        number += 1
                        heappush(waiting, (-likely, number, parent, level + 1, first, end, cell, share))
                first = end + 1

        if rows:
            branch(-1, 0.0, 0, 0, len(rows) - 1)
        while waiting and len(found) < NODES:
            less, _, parent, level, first, last, cell, share = heappop(waiting)
            token = rows[first][level - 1]
            found.tokens.append(token - self._base)
            found.parents.append(parent)
            found.depths.append(level)
            found.totals.append(-less)
            cells.append((cell, share))
            if level < depth and token not in ends:
                branch(len(found) - 1, -less, level, first, last)
        return found

    def learn(self) -> None:
        """Compare the last copies with the tokens that came."""
        parent, proposed = -1, self._proposed
        for token in self._text[self._asked_at :]:
            taken = None
            for node, above in enumerate(proposed.parents):
                if above == parent:
                    cell, share = self._cells[node]
                    self.seen[cell] += share
                    if proposed.tokens[node] == token:
                        self.right[cell] += 1
                        taken = node
            if taken is None:
                break
            parent = taken
        self._proposed = NOTHING
