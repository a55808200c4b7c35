"""Which cache takes over a prefilled one."""

from __future__ import annotations

from collections.abc import Sequence

from transformers.cache_utils import Cache

from hf_dart.cache.aligned import RightAlignedCache
from hf_dart.cache.base import TreeCache
from hf_dart.cache.hybrid import HybridCache, NoEntries
from hf_dart.cache.ragged import RaggedCache
from hf_dart.cache.stock_layers import SIMPLE_LAYERS, attention_layers, keeps_entries, keeps_states


def keeps_only_entries(cache: Cache) -> bool:
    """Whether all layers of the attention keep keys and values and nothing else per position."""
    return all(type(layer) in SIMPLE_LAYERS for layer in attention_layers(cache))


def tree_cache(
    prefilled: Cache,
    pads: list[int],
    capacity: int,
    keep: bool,
    most: int | None = None,
    windows: Sequence[int | None] | None = None,
) -> TreeCache:
    """Take over a prefilled stock cache.

    Args:
        prefilled: the cache after prefill; all its entries belong to the prompt.
        pads: left padding per row.
        capacity: positions to make room for at first.
        keep: the stock cache will be needed again (`write_back`); otherwise its memory is freed.
        most: positions that the call will need at most, if that is known.
        windows: as for `RaggedCache`.
    """
    attention: TreeCache
    if not any(map(keeps_entries, prefilled.layers)):
        attention = NoEntries(prefilled, len(pads))
    elif keeps_only_entries(prefilled):
        attention = RaggedCache(prefilled, pads, capacity, keep, most, windows)
    else:
        attention = RightAlignedCache(prefilled, pads, keep)
    return HybridCache(prefilled, attention) if any(map(keeps_states, prefilled.layers)) else attention
