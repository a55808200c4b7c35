"""Buffers of keys and values by slot, with and without a window."""

from __future__ import annotations

import pytest
import torch

from hf_dart.cache.slot_cache import SlotCache, SlotStore
from hf_dart.trees.tree import MAX_DRAFT_LENGTH


@pytest.mark.parametrize("gradients_when_made", [False, True])
def test_buffers_are_written_with_gradients_wherever_they_were_made(gradients_when_made: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(1, 1, 1, 2))
    with torch.set_grad_enabled(gradients_when_made):
        store = SlotStore(torch.zeros(2, 1, 1, 4, 2))
    for index in (0, 1):
        store.write(index, (index + 2) * weight, 1)
        store.write(index, (index + 4) * weight, torch.tensor([[2]]))
    assert [store.buffer(index)[0, 0, :, 0].tolist() for index in (0, 1)] == [[0, 2, 4, 0], [0, 3, 5, 0]]


def test_a_store_that_longer_texts_go_on_in_grows_seldom() -> None:
    """Up to what the longest of them may need, where each round asks for a little more (`seats.Seats`)."""
    store, capacities = SlotStore(torch.zeros(2, 2, 1, 8, 2), most=12), set()
    store.take_rows(SlotStore(torch.zeros(2, 1, 1, 8, 2), most=100), 8, [(1, 0)])
    for end in range(8, 101):
        store.reserve(end)
        capacities.add(store.capacity)
    assert capacities == {8, 16, 32, 64, 100}


def test_a_windowed_row_may_lose_what_two_rounds_committed() -> None:
    """The window before that is there, however often entries have made room."""
    cache, window = SlotCache(torch.tensor([3]), capacity=8), 5
    store = cache.add(torch.empty(1, 1, 0, 2), 1, window)
    for position in range(3, 400):
        cache.prepare(1)
        store.write(0, torch.full((1, 1, 1, 2), float(position)), cache.start)
        cache.advance(torch.tensor([1]))
        first = position - 2 * (MAX_DRAFT_LENGTH + 1) - window
        if first >= 3:
            assert store.read(0, torch.tensor([first]), window)[0, 0, :, 0].tolist() == [*range(first, first + window)]
    assert store.first > 0
    assert store.capacity < 200


@pytest.mark.parametrize("first", [0, 1])
def test_around_what_is_taken_over_all_is_zero(first: int) -> None:
    """What memory held before might be NaN, which masks do not hide."""
    store, pads, states = (
        SlotStore(torch.full((1, 3, 1, 9, 2), torch.nan), first=first),
        [0, 2, 3],
        torch.ones(3, 1, 5, 2),
    )
    store.take_over(0, states, pads, 7)
    expected = torch.zeros(3, 12)
    for row, pad in enumerate(pads):
        expected[row, max(2 - pad, first) : 7 - pad] = 1
    assert torch.equal(store.storage[0, :, 0, :, 0], expected[:, first : first + 9])
