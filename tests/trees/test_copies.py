"""Copies of earlier text: matches are those of a plain search, and copies are rated by how often they were right."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log
from random import Random

import numpy as np
import pytest
import torch
from support.trees import chain_of, copied_steps, random_copies

from hf_dart.trees import copies
from hf_dart.trees.copies import LONGEST, NOTHING, CopyLevels, RowCopies, TextIndex, best_size, with_copies
from hf_dart.trees.costs import RoundCost


def plain_matches(tokens: Sequence[int], ending: list[int]) -> dict[int, int]:
    """Every place of `tokens` after one that ends like `ending`, but for their own end, and the length of the match."""
    found = {}
    for place in range(1, len(tokens)):
        length = 0
        while length < min(place, len(ending)) and tokens[place - 1 - length] == ending[-1 - length]:
            length += 1
        if length:
            found[place] = length
    return found


def looped(tokens: Sequence[int], place: int, depth: int) -> list[int]:
    """The tokens after a place; from the end on, those after the place once more."""
    return [tokens[place + ahead % (len(tokens) - place)] for ahead in range(depth)]


def texts_of(random: Random, count: int, tokens: int) -> list[list[int]]:
    """Random texts, which repeat each other, each with a 0 after it."""
    found: list[list[int]] = []
    for _ in range(count):
        text = [random.randrange(1, tokens) for _ in range(random.randrange(4, 40))]
        if found and random.random() < 0.7:
            other = random.choice(found)[:-1]
            text = text[: random.randrange(6)] + other[random.randrange(len(other)) :] + text[:3]
        found.append([*text, 0])
    return found


@pytest.mark.parametrize("seed", range(12))
def test_matches_are_those_of_a_plain_search(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains are not cut short; whole texts and single tokens added; ends of what is stored and of other texts."""
    monkeypatch.setattr(copies, "TRIED", 10**6)
    random = Random(seed)
    index, tokens = TextIndex(4096), list[int]()
    found = 0
    for text in texts_of(random, 8, 5 + 40 * (seed % 2)):
        index.add(np.array(text))
        tokens += text
        for token in text[:3]:
            index.append(token)
            tokens.append(token)
        ending = [*text[: random.randrange(len(text))], random.randrange(1, 5)][-LONGEST:]
        for end in (ending, tokens[-3:]):
            wanted = plain_matches(tokens, end)
            rows, lengths = index.matches(end, 5)
            expected = sorted(wanted, reverse=True)
            if any(length >= 3 for length in wanted.values()) and len(wanted) > len(rows):
                # Longer matches are enough.
                expected = [place for place in expected if wanted[place] >= 3]
            assert lengths == [wanted[place] for place in expected]
            assert rows == [looped(tokens, place, 5) for place in expected]
            found += len(rows)
    assert found > 30


def test_the_oldest_tokens_make_room() -> None:
    """Tokens that a ring has lost are no more found, also in a text longer than the ring; a few of the latest are."""
    index = TextIndex(256)
    index.add(np.arange(1, 1000))
    assert index.matches([700, 701, 702], 2) == ([], [])
    assert index.matches([950, 951, 952], 2) == ([[953, 954]], [3])
    for first in range(2000, 2200):
        index.append(first)
    assert index.matches([950, 951, 952], 2) == ([], [])
    assert index.matches([2100, 2101], 1) == ([[2102]], [2])
    index = TextIndex(4096)
    index.add(np.array([1, 2, 3, 4, 0] * 400))
    rows, lengths = index.matches([1, 2, 3], 1)
    assert len(rows) <= copies.TRIED + 1
    assert set(lengths) == {3}


def test_places_are_numbered_again_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_LAST_PLACE", 1500)
    random = Random(1)
    kept, plain = TextIndex(256), list[int]()
    for text in texts_of(random, 200, 9):
        kept.add(np.array(text))
        plain += text
        assert kept.end <= 1500
        _, lengths = kept.matches(text[-9:-1], 4)
        wanted = plain_matches(plain[-256 + LONGEST :], text[-9:-1])
        assert set(lengths) <= set(wanted.values())
        assert max(lengths) == max(wanted.values())


class Texts:
    """A memory of given texts."""

    base = 5 << 32

    def __init__(self, *texts: list[int]) -> None:
        self.index = TextIndex(4096)
        for text in texts:
            self.index.add(np.array([token + self.base + 1 for token in text] + [0]))
        self.matches = self.index.matches

    def chances(self) -> Sequence[float]:
        return copies.PRIOR


def paths_of(found: copies.Copies) -> dict[tuple[int, ...], float]:
    """The paths of a tree, and the chance of each."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(found.tokens, found.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert [len(path) for path in paths] == found.depths
    assert len(set(paths)) == len(paths)
    assert sorted(found.totals, reverse=True) == found.totals
    return dict(zip(paths, map(exp, found.totals), strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_every_node_follows_a_match(seed: int) -> None:
    """Paths lie in the text or the memory; a child is no likelier than its parent, siblings are one or less."""
    random = Random(seed)
    stored = [[random.randrange(6) for _ in range(30)] for _ in range(3)]
    text = [random.randrange(6) for _ in range(5)]
    row, nodes = RowCopies(text, Texts(*stored) if seed % 2 else None), 0
    for _ in range(30):
        found = paths_of(row.suggest(4))
        nodes += len(found)
        after = [looped([*text], place, 4) for place in plain_matches(text, text[-LONGEST:])]
        if seed % 2:
            after += [one[place : place + 4] for one in stored for place in plain_matches([*one, -1], text[-LONGEST:])]
        followed = {tuple(rest[:depth]) for rest in after for depth in range(1, 5)}
        assert set(found) <= followed
        for path, chance in found.items():
            assert path[:-1] in found or len(path) == 1
            children = sum(below for other, below in found.items() if other[:-1] == path)
            assert children <= chance
        text += random.choice(stored)[4:6] if random.random() < 0.5 else [random.randrange(6)]
    assert nodes > 60


def test_loops_and_ends() -> None:
    """A loop goes on, down to the depth that was asked for; after a token that ends the text nothing is copied.

    Nor is a token copied that the target has no logit for.
    """
    assert max(paths_of(RowCopies([5, 1, 2, 3, 1, 2, 3, 1, 2, 3]).suggest(8)), key=len) == (1, 2, 3, 1, 2, 3, 1, 2)
    text = [1, 2, 3, 4, 5, 1, 2]
    assert max(map(len, paths_of(RowCopies(text).suggest(4)))) == 4
    assert set(paths_of(RowCopies(text).suggest(4, ends=[3]))) == {(3,)}
    assert set(paths_of(RowCopies(text, size=5).suggest(4))) == {(3,), (3, 4)}


def test_places_that_disagree_make_a_tree() -> None:
    """The nearer text counts for more, and the longer match; a single place is less sure than several."""
    text = [1, 2, 3, 4, 9, 9, 1, 2, 3, 5, 9, 8, 1, 2, 3, 5, 7, 7, 1, 2, 3]
    found = paths_of(RowCopies(text).suggest(2))
    assert found[(5,)] > found[(4,)]
    assert {(5, 9), (5, 7)} < set(found)
    memory = Texts([1, 2, 3, 6, 6])
    assert {(5,), (4,), (6,)} < set(paths_of(RowCopies(text, memory).suggest(2)))
    one, several = (paths_of(RowCopies([7, 3], Texts(*[[7, 3, 6]] * count)).suggest(1)) for count in (1, 4))
    assert several[(6,)] > one[(6,)]


def test_learns_how_often_copies_are_right() -> None:
    """By cell, each token once: of a tree of two branches, one came, and then another token than its child."""
    chances = {}
    for right in (True, False):
        text = [1, 2, 3, 1, 2]
        row = RowCopies(text)
        for number in range(12):
            text += row.suggest(4).tokens[:1] if right else [9 + number]
            text += [1, 2]
        chances[right] = row.suggest(4).totals[0]
    assert chances[True] > log(0.8) > chances[False]
    text = [1, 2, 3, 4, 9, 1, 2, 5, 9, 9, 1, 2]
    row = RowCopies(text)
    found = paths_of(row.suggest(2))
    assert {(5,), (3,), (5, 9), (3, 4)} <= set(found)
    text += [3, 8]
    row.suggest(2)
    assert sum(row.right) == 1
    # All places of depth 1 have weight 1 in sum, and so have those after the 3.
    assert sum(row.seen) == pytest.approx(2, abs=0.2)


def test_a_text_that_outgrows_its_index_is_indexed_again() -> None:
    text, random = [1, 2, 3], Random(3)
    row = RowCopies(text)
    before = row._index.capacity
    while row._index.capacity == before:
        text += [random.randrange(50) for _ in range(30)]
        row.suggest(3)
    text += text[4:9]
    assert tuple(text[9:12]) in paths_of(row.suggest(3))


def test_levels_hold_the_tree_of_each_row() -> None:
    """What leads from level to level is held against a plain search in test_growers.py."""
    random = Random(5)
    for _ in range(60):
        rows = [random_copies(random, random.randrange(12), 4) for _ in range(random.randrange(1, 4))]
        levels = CopyLevels.of(rows)
        for row, one in enumerate(rows):
            wanted = paths_of(one)
            assert set(copied_steps(levels, row)) == set(wanted)
            tokens = levels.by_depth(3)[row]
            for depth in range(3):
                distinct = [token for token in tokens[depth].tolist() if token >= 0]
                assert sorted(distinct) == sorted({path[-1] for path in wanted if len(path) == depth + 1})
    assert CopyLevels.of([NOTHING, NOTHING]).tokens.shape == (2, 0)


def test_copied_tokens_are_more_candidates() -> None:
    """Copies are added where the drafter has not found them already."""
    tokens, scores = torch.tensor([[[1, 2], [3, 4]], [[1, 2], [3, 4]]]), torch.full((2, 2, 2), -1.0)
    copied = torch.tensor([[[9, 1], [4, -1]], [[-1, -1], [7, 8]]])
    wide, wide_scores = with_copies(tokens, scores, copied)
    assert wide.tolist() == [[[1, 2, 9, -1], [3, 4, -1, -1]], [[1, 2, -1, -1], [3, 4, 7, 8]]]
    assert wide_scores.tolist() == [[[-1.0, -1.0, -inf, -inf]] * 2] * 2


def test_the_size_that_brings_most() -> None:
    """Against every size tried; rows count by their weights, and levels where they cost."""
    random = Random(2)
    for number in range(30):
        rows = [random_copies(random, 9, 5) for _ in range(2)]
        weights = [random.random(), random.random()]
        cost = RoundCost(0.0, 1 + 0.08 * np.arange(8), 0.1 * (number % 2))
        rates = []
        for size in range(min(7, max(map(len, rows))) + 1):
            both = zip(rows, weights, strict=True)
            taken = [exp(total) * weight for one, weight in both for total in one.totals[:size]]
            deepest = max((depth for one in rows for depth in one.depths[:size]), default=0)
            rates.append((1 + sum(taken)) / cost.of(size + 1, deepest))
        size, expected, spent = best_size(rows, weights, cost)
        assert rates[size] == pytest.approx(max(rates)) == pytest.approx(expected / spent)
    assert best_size([NOTHING], [1.0], RoundCost(0.0, np.ones(4))) == (0, 1.0, 1.0)


def test_what_came_of_a_tree() -> None:
    tree = copies.Copies([4, 5, 6], [-1, -1, 1], [1, 1, 2], [-0.5, -1.0, -2.0])
    assert [tree.accepted(came, 3) for came in ([5, 6, 1], [5, 6], [4, 6], [7], [])] == [2, None, 1, 0, None]
    assert [tree.accepted([5, 6], nodes) for nodes in (0, 1, 2)] == [0, 0, 1]
    assert tree.right(3, 3).tolist() == pytest.approx([exp(-0.5) + exp(-1), exp(-2), 0])
    assert tree.right(2, 1).tolist() == pytest.approx([exp(-0.5), 0])
    assert chain_of([], -1.0) == NOTHING
