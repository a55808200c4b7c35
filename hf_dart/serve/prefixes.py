"""`Prefixes`: beginnings that prompts share, such as system prompts, which the target reads once or twice in all."""

from __future__ import annotations

from collections import deque
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.decoding.feed import DrafterState, PromptReader, leave, reads_in_pieces
from hf_dart.decoding.request import Request
from hf_dart.drafters.base import Drafter, Verified
from hf_dart.models.devices import contents_of
from hf_dart.models.identity import identity
from hf_dart.models.stock_steps import cache_name
from hf_dart.models.support import parts_of

_RECENT = 32  # prompts that a new one is compared with
_LEAST = 32  # tokens that are worth a cache


class _Prefix(NamedTuple):
    """A beginning of prompts: tokens [n + 1], of which stock's cache holds n, and what the drafter has of them.

    Layers of the cache make new tensors when they grow, so that copies share these. `state` is the drafter's, after the
    first n - 1 positions (None: drafters that look at tokens alone read them again), and `features` [1, 1, F] are those
    of the last one.
    """

    tokens: Tensor
    cache: Cache
    drafter: ref[Any]
    state: SlotCache | None
    features: Tensor


class Prefixes:
    """Caches of the beginnings that a prompt shares with one of the last ones before it, of `most` tokens in all.

    The first prompt that shares a beginning reads it once more, and leaves its cache; those after it begin there.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._prompts: deque[Tensor] = deque(maxlen=_RECENT)
        self._kept: list[_Prefix] = []  # the one that was used last at the end
        self._target: Any = None
        self._weights: Any = None  # of the target
        self.checked = False  # its weights are those

    def begin(self, request: Request) -> tuple[Request, int]:
        """Return the request over the longest beginning that is kept, and the tokens worth keeping of its prompt."""
        if not self._serves(request):
            return request, 0
        ids = request.input_ids[0].cpu()
        shared = max((_common(ids, other) for other in self._prompts), default=0) - 1
        self._prompts.append(ids)
        if self._kept or shared >= _LEAST:
            model = request.model
            if not self.checked:
                self.checked = True  # before they are read: meanwhile a later request may ask for that again
                self._weights = contents_of(model.parameters())
            target = identity(model), contents_of(model.buffers()), self._weights
            if target != self._target:
                self._kept.clear()
                self._target = target
        served = (one for one in self._kept if one.drafter() is request.drafter or not request.drafter.feature_layers)
        fitting = [one for one in served if _common(ids, one.tokens) == len(one.tokens)]
        if fitting:
            prefix = max(fitting, key=lambda one: len(one.tokens))
            self._kept.sort(key=lambda one: one is prefix)
            request = _over(request, prefix)
        return request, shared if shared - request.cached >= _LEAST else 0

    def _serves(self, request: Request) -> bool:
        """Return True if a prompt may begin with a cache of ours, and leave one."""
        positions, own = request.model_kwargs.get("position_ids"), torch.arange(request.total)
        return (
            self._most > 0
            and reads_in_pieces(request)
            and not request.users_cache  # which is to be filled itself
            and not any(request.pads)
            and (positions is None or bool((positions[..., -len(own) :].cpu() == own).all()))
            and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in request.stock_cache.layers)
            and not any(hasattr(part, "base_layer") for part in parts_of(request.model))  # adapters may be switched
        )

    def keep(self, reader: PromptReader, drafter: Drafter[Any], shared: int) -> None:
        """Keep what has been read of a prompt in pieces, if the next one would go beyond what is `shared` (`begin`)."""
        request, read, state = reader.request, reader.read, reader.state
        if not read <= shared < read + request.generation_config.prefill_chunk_size or read > self._most:
            return
        own = _copy(state) if type(state) is SlotCache and int(state.counted + state.dropped) == read - 1 else None
        tokens = request.input_ids[0, : read + 1].cpu()
        self._kept.append(_Prefix(tokens, _sharing(request.stock_cache), ref(drafter), own, reader.last))
        while sum(len(one.tokens) - 1 for one in self._kept) > self._most:
            del self._kept[0]


def _over(request: Request, prefix: _Prefix) -> Request:
    """Return a request that begins with the cache of a prefix, from which its drafter's state goes on, too."""
    cache, tokens = _sharing(prefix.cache), prefix.tokens[None]
    if prefix.state is not None and prefix.drafter() is request.drafter:
        unread = Verified(prefix.features, tokens[:, -1:].to(request.input_ids.device), torch.ones(1, dtype=torch.long))
        leave(cache, request.drafter, DrafterState(_copy(prefix.state), 0, request.pads), unread, 0, tokens)
    kwargs = {**request.model_kwargs, cache_name(request.model): cache}
    return replace(request, model_kwargs=kwargs, cached=tokens.shape[1] - 1)


def _sharing(cache: Cache) -> Cache:
    """Return a cache that grows by itself, over the same tensors."""
    other = copy(cache)
    other.layers = [copy(layer) for layer in cache.layers]
    return other


def _copy(state: SlotCache) -> SlotCache:
    """Return a drafter's state with entries of its own."""
    other = state.like(state.lengths.new_zeros(1), state.longest)
    other.take_rows(state, [(0, 0)])
    return other


def _common(one: Tensor, other: Tensor) -> int:
    """Return the number of first tokens that two texts [T] share."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length
