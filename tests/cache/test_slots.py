"""Buffers of keys and values by slot."""

from __future__ import annotations

import pytest
import torch

from hf_dart.cache.slots import SlotSpec, SlotStore


@pytest.mark.parametrize("gradients_when_made", [False, True])
def test_buffers_are_written_with_gradients_wherever_they_were_made(gradients_when_made: bool) -> None:
    spec = SlotSpec(1, 2, torch.float32, torch.device("cpu"))
    weight = torch.nn.Parameter(torch.ones(1, 1, 1, 2))
    with torch.set_grad_enabled(gradients_when_made):
        store = SlotStore([spec, spec], batch_size=1, capacity=4)
    for index in (0, 1):
        store.write(index, (index + 2) * weight, 1)
        store.write(index, (index + 4) * weight, torch.tensor([[2]]))
    assert [store.buffer(index)[0, 0, :, 0].tolist() for index in (0, 1)] == [[0, 2, 4, 0], [0, 3, 5, 0]]
