"""The layers of transformers' own caches: what they hold, and how an update of them is taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)


class _Absent:
    """Kind of layers that a release of transformers does not have, or not as we need it."""


DummyLayer: Any = getattr(cache_utils, "DummyLayer", _Absent)
# Models of releases without `get_conv_state` reach into the layers themselves.
_HAS_STATES = hasattr(Cache, "get_conv_state")
_BESIDE_STATES = ("Full", "SlidingWindow", "StaticFull", "StaticSlidingWindow")
LinearAttentionLayer: Any = cache_utils.LinearAttentionLayer if _HAS_STATES else _Absent

SIMPLE_LAYERS: tuple[type, ...] = (
    *(DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer),
    *(getattr(cache_utils, f"LinearAttentionAnd{kind}AttentionLayer") for kind in _BESIDE_STATES if _HAS_STATES),
)
"""Layers of which keys and values are all that they keep per position, some beside running states."""


def keeps_states(layer: Any) -> bool:
    """Return True if a layer keeps running states, as linear attention, Mamba and short convolutions do."""
    return isinstance(layer, LinearAttentionLayer)


def keeps_entries(layer: Any) -> bool:
    """Return True if a layer keeps keys and values."""
    return isinstance(layer, CacheLayerMixin)


def attention_places(cache: Cache) -> list[int]:
    """Return the indices of the layers that keep keys and values; in a cache that is still empty, of those that may.

    The others read another layer's, attend to an image or a sound where there is text alone, or keep running states.
    """
    able = [index for index, layer in enumerate(cache.layers) if keeps_entries(layer)]
    return [index for index in able if cache.layers[index].is_initialized] or able


def attention_layers(cache: Cache) -> list[Any]:
    """Return the layers that keep keys and values."""
    return [cache.layers[index] for index in attention_places(cache)]


def slots_of(cache: Cache) -> int:
    """Return the number of slots that a cache's attention layers hold; 0 if it has running states alone."""
    return int(cache.get_seq_length()) if any(map(keeps_entries, cache.layers)) else 0


def take_states(layer: Any, source: Any) -> None:
    """Give a stock layer the running states of another one, the very tensors."""
    for name in vars(LinearAttentionLayer()):
        value = vars(source)[name]
        vars(layer)[name] = dict(value) if isinstance(value, dict) else value


def window_of(layer: Any) -> int | None:
    """Return the number of positions that a dynamic layer's queries attend to, their own included; None if all."""
    return getattr(layer, "sliding_window", None)


def held_by(layer: Any) -> tuple[Tensor, Tensor]:
    """Keys and values [B, heads, n, head_dim] of the last n slots; empty slots of a static layer left out."""
    keys, values = layer.keys, layer.values
    if isinstance(layer, StaticLayer):
        filled = min(int(layer.get_seq_length()), layer.max_cache_len)
        keys, values = keys[:, :, :filled], values[:, :, :filled]
    return keys, values


@contextmanager
def undone_on_failure(cache: Cache, slots: int) -> Iterator[None]:
    """Put a stock cache back to what it held before, should the block raise: no layer is ahead of another.

    The block brings it to so many slots.
    """
    undo = [_undo(layer, slots) for layer in cache.layers]
    try:
        yield
    except BaseException:
        del cache.layers[len(undo) :]
        for restore in undo:
            restore()
        raise


def _undo(layer: Any, slots: int) -> Callable[[], None]:
    """Return a function that puts one layer, which is brought to so many slots, back to its present state."""
    before = dict(vars(layer))
    cut = {}
    states = [(its, dict(its)) for its in before.values() if isinstance(its, dict)]
    if isinstance(layer, StaticLayer):
        # Written in place. The old length hides new entries of a full layer again; a sliding one shifts, so copy it.
        kept = [
            (tensor, tensor.clone())
            for tensor in before.values()
            if isinstance(tensor, Tensor) and (tensor.ndim == 0 or layer.is_sliding)
        ]
    else:
        kept = []
        if slots < (window_of(layer) or slots + 1):
            # It only grows: cut the old tensors from the new ones, so that both are never alive at once.
            for name in ("keys", "values"):
                if before.get(name) is not None and before[name].numel():
                    cut[name] = before.pop(name).shape[2]
    kept += [(tensor, tensor.clone()) for _, of in states for tensor in of.values() if isinstance(tensor, Tensor)]

    def restore() -> None:
        whole = {name: vars(layer)[name][:, :, :length] for name, length in cut.items()}
        vars(layer).clear()
        vars(layer).update(before, **whole)
        for now, of in states:
            now.clear()
            now.update(of)
        for tensor, values in kept:
            tensor.copy_(values)

    return restore
