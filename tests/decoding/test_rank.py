"""The best K of a vocabulary in two steps."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dart.decoding.rank import largest


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 9000),
    k=st.integers(1, 20),
    levels=st.sampled_from([2, 5, 1000, None]),
    seed=st.integers(0, 2**31),
)
def test_top_k_in_two_steps(size: int, k: int, levels: int | None, seed: int) -> None:
    """With few levels nearly everything is a tie: then the order of places decides, as in a stable sort."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn((2, 3, size), generator=generator)
    if levels is not None:
        scores = torch.randint(levels, scores.shape, generator=generator).float()
    k = min(k, size)
    values, places = largest(scores, k)
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, ordered[..., :k])
    assert torch.equal(places, order[..., :k])
    assert torch.equal(values, scores.topk(k).values)


def test_top_k_of_what_is_nowhere() -> None:
    """Places after the end, which fill up the last chunk, are never named."""
    scores = torch.full((1, 20 * 256 + 3), -torch.inf)
    values, places = largest(scores, 4)
    assert places.tolist() == [[0, 1, 2, 3]]
    assert values.tolist() == [[-torch.inf] * 4]
