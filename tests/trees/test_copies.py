"""Copies of earlier text: the longest match is found, and copies are rated by how often they were accepted."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
import torch

from hf_dart.trees.copies import RowLookup, padded, with_copies


def continuation(text: list[int], length: int) -> list[int] | None:
    """What follows the longest earlier match of the end of the text, the latest of several; None if none."""
    best, best_end = 1, 0
    for end in range(2, len(text)):
        matched = 0
        while matched < end and text[end - 1 - matched] == text[-1 - matched]:
            matched += 1
        if matched >= max(best, 2) and (matched > best or end > best_end):
            best, best_end = matched, end
    if not best_end:
        return None
    copied: list[int] = []
    for offset in range(length):
        copied.append([*text, *copied][best_end + offset])
    return copied


@pytest.mark.parametrize("seed", range(10))
def test_finds_the_longest_match(seed: int) -> None:
    """Texts short enough that no occurrence is passed over."""
    random = Random(seed)
    text = [random.randrange(4) for _ in range(3)]
    lookup = RowLookup(text)
    found = 0
    for _ in range(20):
        copied, chance = lookup.suggest(3)
        wanted = continuation(text, 3)
        if wanted is None:
            assert copied == []
        else:
            found += 1
            assert -inf < chance < 0
            assert copied == wanted[: len(copied)]
            assert copied, "a copy is put forward"
        text += [random.randrange(4) for _ in range(random.choice([1, 1, 2]))]
    assert found > 5


def test_a_loop_goes_on() -> None:
    text = [5, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    copied, _ = RowLookup(text).suggest(8)
    assert copied == [1, 2, 3, 1, 2, 3, 1, 2][: len(copied)]
    assert len(copied) > 3


def test_learns_how_often_copies_are_right() -> None:
    chances = {}
    for right in (True, False):
        text = [1, 2, 3, 1, 2]
        lookup = RowLookup(text)
        random = Random(0)
        for _ in range(12):
            copied, _ = lookup.suggest(4)
            text += copied[:2] if right else [9 + random.randrange(3)]
            text += [1, 2]
        chances[right] = lookup.suggest(4)[1]
    assert chances[True] > chances[False]


def test_a_copied_token_is_one_more_candidate() -> None:
    """Where the drafter has not found it already; what goes beyond its depths is left out."""
    tokens, scores = torch.tensor([[[1, 2], [3, 4]], [[1, 2], [3, 4]]]), torch.full((2, 2, 2), -1.0)
    copied, chances = padded([([9, 4, 7], -0.5), ([2], -0.1)])
    assert copied.tolist() == [[9, 4, 7], [2, -1, -1]]
    assert chances.tolist() == [[-0.5] * 3, [-0.1, -inf, -inf]]
    wide, wide_scores = with_copies(tokens, scores, torch.from_numpy(copied))
    assert wide.tolist() == [[[1, 2, 9], [3, 4, -1]], [[1, 2, -1], [3, 4, -1]]]
    assert wide_scores.tolist() == [[[-1.0, -1.0, -inf]] * 2] * 2
    shorter, _ = with_copies(tokens, scores, torch.from_numpy(copied[:, :1]))
    assert shorter.tolist() == [[[1, 2, 9], [3, 4, -1]], [[1, 2, -1], [3, 4, -1]]]
    assert [part.shape for part in padded([([], -inf)] * 2)] == [(2, 0)] * 2
