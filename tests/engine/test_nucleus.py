"""The nucleus that is searched for is the one that stock's warper finds by a sort."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import TopPLogitsWarper

from hf_dart.engine.nucleus import outside_nucleus

SCALES = {"equal": 0.0, "flat": 0.01, "random": 1.0, "peaked": 5.0, "one token": 50.0}
TOP_P = (0.0, 0.1, 0.5, 0.7, 0.9, 0.95, 0.999, 1.0)


EDGE = 1e-6
"""Sums of float32 chances are as uncertain: stock's own differ by as much between devices."""


def by_sorting(scores: torch.Tensor, top_p: float, least: int) -> torch.Tensor:
    """Stock's own, equal scores in the order of their places: that of a sort on a GPU; on a CPU it is any."""
    unstable = torch.sort
    torch.sort = functools.partial(unstable, stable=True)  # type: ignore[assignment]
    try:
        return TopPLogitsWarper(top_p, min_tokens_to_keep=least)(None, scores)
    finally:
        torch.sort = unstable


def assert_same(scores: torch.Tensor, top_p: float, least: int) -> int:
    """The same, unless a token is where the sum is on the edge; returns how many are, and differ."""
    found = outside_nucleus(scores, top_p, least)
    wanted = by_sorting(scores, top_p, least) == -torch.inf
    wrong = (found != wanted) & (scores > -torch.inf)
    ordered = scores.sort(stable=True)
    sums = torch.zeros_like(scores, dtype=torch.float64)
    sums = sums.scatter(1, ordered.indices, ordered.values.double().softmax(-1).cumsum(-1))
    assert ((sums - (1 - top_p)).abs()[wrong] < EDGE).all(), (top_p, least)
    return int(wrong.sum())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("vocabulary", [1, 2, 7, 48, 1021, 50_000])
def test_the_same_tokens(vocabulary: int, scale: str) -> None:
    """Ties included: of scores that are whole numbers, and of equal ones, which a sum is on the edge of."""
    generator = torch.Generator().manual_seed(vocabulary)
    drawn = SCALES[scale] * torch.randn(4, vocabulary, generator=generator)
    hidden = torch.rand(drawn.shape, generator=generator) < 0.8
    hidden[:, -1] = False
    signed = torch.where(drawn > 0, 0.0, -0.0)  # equal, though their bits are not
    differ = 0
    for scores in (drawn, drawn.round(), drawn.masked_fill(hidden, -torch.inf), signed):
        for top_p in TOP_P if vocabulary < 5000 else (0.5, 0.9):
            for least in (1, 2, 5) if vocabulary < 5000 else (1,):
                if least <= vocabulary:
                    differ += assert_same(scores, top_p, least)
    assert differ == 0 or vocabulary > 5000


def test_on_the_edge() -> None:
    """Ten tokens of 0.1: of those that add up to 1 - top_p, the last one goes or stays as stock's float32 has it."""
    for tokens in (3, 7, 10, 64):
        scores = torch.zeros(1, tokens)
        for kept in range(1, tokens):
            top_p = kept / tokens
            assert assert_same(scores, top_p, 1) == 0, (tokens, kept)


def test_it_is_one_graph() -> None:
    """Nothing is read back."""
    search = torch.compile(outside_nucleus, fullgraph=True, backend="eager")
    scores = torch.randn(3, 100)
    assert torch.equal(search(scores, 0.8), outside_nucleus(scores, 0.8))
