"""Updates of transformers' own caches that are taken back when a call fails in its prefill."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny import prompts, tiny_target
from support.users import OwnError
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from hf_dart.cache.stock_layers import undone_on_failure
from hf_dart.models.stock_steps import CACHE


@pytest.mark.parametrize("held", [0, 3, 5, 6, 9, 14])
@pytest.mark.parametrize(("family", "make"), [
    ("gemma3", lambda config: DynamicCache(config=config)),
    ("gemma3", lambda config: StaticCache(config=config, max_cache_len=24)),
    ("llama", lambda config: DynamicCache()),
])  # fmt: skip
def test_updates_are_undone(family: str, make: Callable[[Any], Any], held: int) -> None:
    """With what a cache of every kind held before, its window full or not, it goes on as if nothing had been."""
    target = tiny_target(family)
    tokens = prompts([20, 20])["input_ids"]
    cache = make(target.config)

    def feed(start: int, stop: int) -> Tensor:
        return target(input_ids=tokens[:, start:stop], **{CACHE: cache}, use_cache=True).logits

    def break_off() -> None:
        with undone_on_failure(cache, held + 5):
            feed(held, held + 5)
            raise OwnError

    with torch.no_grad():
        if held:
            feed(0, held)
        before = copy.deepcopy(cache)
        addresses = [layer.keys.data_ptr() for layer in cache.layers if isinstance(layer, StaticLayer) and held]
        with pytest.raises(OwnError):
            break_off()
        assert [layer.keys.data_ptr() for layer in cache.layers if isinstance(layer, StaticLayer) and held] == addresses
        assert cache.get_seq_length() == before.get_seq_length() == held
        assert len(cache.layers) == len(before.layers)
        got = feed(held, 20)
        cache = before
        assert torch.equal(got, feed(held, 20))
