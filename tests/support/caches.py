"""Filled caches, and whether two hold the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from hf_dart.cache.stock_layers import attention_layers, held_by, keeps_states, slots_of
from hf_dart.models.stock_steps import CACHE

# Sums in another order differ in the last bits.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
# Those of `ROUNDS_INSIDE`.
FP32 = {"rtol": 1e-5, "atol": 1e-5}


def prefill(target: Any, inputs: dict[str, Tensor]) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    target(**inputs, position_ids=positions, **{CACHE: cache}, use_cache=True)
    return cache


def assert_same_cache(
    ours: Cache, stock: Cache, pads: list[int], tokens: Tensor | None = None, close: dict[str, float] = CLOSE
) -> None:
    """All layers hold the same entries in the same slots; what padding left there is nobody's business.

    Of a text `tokens` [B, T], the last one alone has not been run yet.
    """
    assert type(ours) is type(stock)
    slots = slots_of(stock)
    assert slots_of(ours) == slots
    assert tokens is None or slots == (tokens.shape[1] - 1 if attention_layers(stock) else 0)
    assert list(map(type, ours.layers)) == list(map(type, stock.layers))
    for left, right in zip(attention_layers(ours), attention_layers(stock), strict=True):
        assert int(left.get_seq_length()) == int(right.get_seq_length())
        if not right.is_initialized:
            continue
        assert left.keys.shape == right.keys.shape
        for got, want in zip(held_by(left), held_by(right), strict=True):
            hidden = slots - want.shape[2]  # slots that have left the window
            for row, pad in enumerate(pads):
                first = max(0, pad - hidden)
                torch.testing.assert_close(got[row, :, first:], want[row, :, first:], equal_nan=True, **close)
    for left, right in zip(ours.layers, stock.layers, strict=True):
        if keeps_states(right):
            assert_same_states(left, right)


def assert_same_states(left: Any, right: Any) -> None:
    """Two stock layers hold the same running states, up to rounding: some are computed in fp32 in any case."""
    for kind in ("conv_states", "recurrent_states"):
        ours, stock = getattr(left, kind), getattr(right, kind)
        assert ours.keys() == stock.keys()
        for index, want in stock.items():
            assert (want is None) == (ours[index] is None)
            if want is not None:
                torch.testing.assert_close(ours[index], want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
    assert left.has_previous_state == right.has_previous_state
