"""Several turns over one cache: the drafter goes on with the state that it left there, if that still fits.

The state hangs on the cache object and goes with it; copies and pickles of the cache start without one. It can only
change what is drafted, never what is generated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from hf_dart.cache.stock_layers import attention_layers, slots_of
from hf_dart.drafters.base import Drafter, Verified


@dataclass
class DrafterState:
    """A drafter's state and what of the text it covers."""

    state: Any  # as the drafter's `begin` returned it
    start: int  # slot of the first position that it took in; a prefix that lay in the cache already was left out
    pads: list[int]  # left padding of each row
    multimodal: bool = False  # the text has more in it than its tokens say, such as images

    def lengths(self, slots: int) -> Tensor:
        """[B] positions that the state has taken in when it covers that many slots."""
        return torch.tensor([max(slots - max(pad, self.start), 0) for pad in self.pads])


@dataclass
class _StateLeft:
    """Drafter state that a call left with a cache."""

    drafter: ref[Drafter[Any]]
    state: DrafterState
    pending: Verified
    first: int  # slot of the first token that is known
    tokens: Tensor  # [B, S] from there to the slot after the cache
    keys: ref[Tensor] | None  # of the first layer, where every update makes a new tensor


_left: WeakKeyDictionary[Cache, _StateLeft] = WeakKeyDictionary()


def leave(
    cache: Cache, drafter: Drafter[Any], state: DrafterState, pending: Verified, first: int, tokens: Tensor
) -> None:
    """Keep a drafter's state for the next call over this cache, which holds all but the last of the tokens [B, S].

    They lie in slots first .. first + S - 1; the state has not taken in the `pending` positions.
    """
    keys = _first_keys(cache)
    _left[cache] = _StateLeft(ref(drafter), state, pending, first, tokens, None if keys is None else ref(keys))


def resume_state(
    cache: Cache, drafter: Drafter[Any], input_ids: Tensor, first: int, pads: list[int]
) -> DrafterState | None:
    """Return the state that this drafter left with the cache, brought to the cache's end; None if it does not fit.

    `input_ids` [B, P] lie in slots first .. first + P - 1. Whatever was left is handed out once: a call that breaks off
    leaves nothing.
    """
    left = _left.pop(cache, None)
    cached = slots_of(cache)
    if left is None or left.drafter() is not drafter or left.state.pads != pads or cached <= left.state.start:
        return None
    # A position is read together with the token after it, so one more token than the cache has must agree.
    known = max(first, left.first)
    if not known <= cached < left.first + left.tokens.shape[1]:
        return None
    tokens = left.tokens[:, known - left.first : cached + 1 - left.first].to(input_ids.device)
    if not torch.equal(tokens, input_ids[:, known - first : cached + 1 - first]):
        return None
    # If not all tokens can be compared, or images are among them, the cache must be the very one that was left.
    if (known > 0 or left.state.multimodal) and (left.keys is None or left.keys() is not _first_keys(cache)):
        return None
    fits = drafter.resume(left.state.state, left.pending, left.state.lengths(cached))
    return left.state if fits else None


def _first_keys(cache: Cache) -> Tensor | None:
    """Return the keys of the first layer; None where an update makes no new tensor of them."""
    layer = next(iter(attention_layers(cache)), None)
    return layer.keys if isinstance(layer, DynamicLayer) else None
