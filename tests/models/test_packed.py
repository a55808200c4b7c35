"""Packed attention against stock's, and the targets that attend by it for a while."""

from __future__ import annotations

from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from support.attention_kernels import attends_to_trees
from support.tiny import tiny_target
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_dart.drafters.layers import attend
from hf_dart.models.attention import TreeAttention, attend_in_groups, packed_attention


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("masked", [True, False])
def test_packed_attention_is_stocks(groups: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key, value = normal(2, 2 * groups, 5, 8), normal(2, 2, 11, 8), normal(2, 2, 11, 6)
    hidden = torch.rand((2, 1, 5, 11), generator=generator) < 0.4
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, torch.finfo(torch.float64).min)
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    arguments = {"attention_mask": mask if masked else None, "scaling": 0.3, "is_causal": False}
    found, _ = packed_attention(module, query, key, value, **arguments)  # type: ignore[arg-type]
    wanted, _ = sdpa_attention_forward(module, query, key, value, **arguments)  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted)
    assert found.is_contiguous()


@pytest.mark.parametrize("groups", [1, 3])
def test_attention_in_groups_is_pytorchs(groups: int) -> None:
    """Under the masks of heads and DFlash drafters."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2 * groups, 5, 8, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(2, 2, 11, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(2, 1, 5, 11, generator=generator) < 0.6
    mask[..., 0] = True
    wanted = attend(query, key, value, mask)
    torch.testing.assert_close(attend_in_groups(query, key, value, mask), wanted)


def test_only_the_thread_of_the_round_is_packed() -> None:
    target = tiny_target("llama")
    found: list[bool] = []

    def look() -> None:
        found.append(attends_to_trees())

    with TreeAttention(target).packed():
        look()
        other = Thread(target=look)
        other.start()
        other.join()
    look()
    assert found == [True, False, False]
    with pytest.raises(RuntimeError, match="inside"), TreeAttention(target).packed():
        raise RuntimeError("inside")
    look()
    with TreeAttention(tiny_target("llama", "eager")).packed():
        look()
    assert not any(found[1:])
