"""Filled caches, and whether two hold the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_dart.cache.stock_layers import DummyLayer

# Sums in another order differ in the last bits.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def prefill(target: Any, inputs: dict[str, Tensor]) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    target(**inputs, position_ids=positions, past_key_values=cache, use_cache=True)
    return cache


def assert_same_cache(ours: DynamicCache, stock: DynamicCache, pads: list[int], tokens: Tensor) -> None:
    """All layers hold the same entries in the same slots; what padding left there is nobody's business."""
    assert type(ours) is type(stock)
    assert ours.get_seq_length() == stock.get_seq_length() == tokens.shape[1] - 1
    assert len(ours.layers) == len(stock.layers)
    for left, right in zip(ours.layers, stock.layers, strict=True):
        assert type(left) is type(right)
        if isinstance(left, DummyLayer):
            continue
        for name in ("keys", "values"):
            got, want = getattr(left, name), getattr(right, name)
            assert got.shape == want.shape
            hidden = max(0, stock.get_seq_length() - want.shape[2])  # slots that have left the window
            for row, pad in enumerate(pads):
                first = max(0, pad - hidden)
                torch.testing.assert_close(got[row, :, first:], want[row, :, first:], **CLOSE)
        if getattr(right, "cumulative_length", None) is not None:
            assert int(left.cumulative_length) == int(right.cumulative_length)
        if getattr(right, "is_indexer_initialized", False):
            for row, pad in enumerate(pads):
                torch.testing.assert_close(left.indexer_keys[row, pad:], right.indexer_keys[row, pad:], **CLOSE)
