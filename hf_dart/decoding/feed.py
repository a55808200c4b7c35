"""The prompt: stock's prefill, read by the drafter chunk by chunk, and the cache that takes over from it.

Of several turns over one cache the drafter goes on with the state that it left there, if that still fits. It hangs on
the cache object and goes with it; copies and pickles of the cache start without one. It can only change what is
drafted, never what is generated.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from hf_dart.cache.stock_layers import attention_layers, keeps_states, slots_of
from hf_dart.cache.target_cache import TargetCache
from hf_dart.decoding.request import Request
from hf_dart.decoding.rows import Rows
from hf_dart.drafters.base import AT_ONCE, Drafter, Verified, entries_of
from hf_dart.models.devices import users_default
from hf_dart.models.features import vocabulary_size
from hf_dart.models.positions import refuse_crossing, rotary_turn
from hf_dart.models.stock_steps import cache_after, extra_inputs, next_inputs, position_shift
from hf_dart.models.support import refuse_cache, refuse_compressed
from hf_dart.models.trial import refuse_extra_inputs
from hf_dart.models.verify import (
    MaskKind,
    features_request,
    gather_features,
    layer_windows,
    mask_kinds,
    merged_embeddings,
)

# The first allocation of the key and value buffers reaches this far after the prompt; they double from there.
_HEADROOM = 512
# Each chunk of ids brings all embeddings in some releases of transformers, none in others.
_NOT_THE_PROMPT = (
    "generate runs over other positions than the prompt's, as it does with input_ids, inputs_embeds and "
    "prefill_chunk_size together, and before transformers 5.21 with prefill_chunk_size and a cached prefix; leave "
    "prefill_chunk_size out."
)


class PromptReader:
    """Proxy of the target during stock's `_prefill`, which hands the drafter each position with the token after it.

    `_prefill` returns the last chunk's outputs only, and hooks on the target would be state that concurrent calls see;
    this proxy is neither. The prompt's last position has no token after it yet: its features wait for the first
    generated token.
    """

    def __init__(self, request: Request, state: Any) -> None:  # of the drafter
        self._target, self.request, self.state = request.model, request, state
        prompt = request.prompt[:, request.cached - request.total :]
        if request.multimodal and not prompt.is_floating_point():
            # Ids of images may have no embedding: such models look up another token there before inserting the image's.
            prompt = torch.where(prompt < vocabulary_size(request.model), prompt, 0)
        self._prompt = prompt  # the ids [B, T] or embeddings [B, T, E] that prefill runs over
        self._pads = torch.tensor([max(pad - request.cached, 0) for pad in request.pads])
        self._next = 0  # slot of the first position that was not handed on
        self.last: Any = None  # [B, 1, F] features of the last position that was read
        self.tail: Verified | None = None  # the last positions that were handed on
        self.outputs: Any = None  # of the last chunk, once all are read
        self.width = 0  # positions of the last chunk
        self.shift: Tensor | None = None  # `position_shift` of stock's first step after the prompt
        self.extra_inputs: dict[str, Any] = {}  # what stock hands the target in that step that is not text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    @property
    def read(self) -> int:
        """Slots of the prompt that the target has read, the cached ones included; the last is `last`."""
        return self.request.cached + self._next + 1

    def __call__(self, **inputs: Any) -> Any:
        drafter = self.request.drafter
        text_only = not extra_inputs(self._target, inputs)
        merged = drafter.reads_embeddings and inputs.get("input_ids") is not None and not text_only
        asked = inputs.get("output_hidden_states")
        if not asked:
            # Towers of images would take indices of layers for theirs.
            inputs.update(features_request(drafter.feature_layers) if text_only else {"output_hidden_states": True})
        with users_default():
            outputs = self._target(**inputs)
        ran = inputs["inputs_embeds"][..., 0] if inputs.get("input_ids") is None else inputs["input_ids"]
        self.width = ran.shape[1]
        features = gather_features(outputs, drafter.feature_layers, ran)
        embeddings = merged_embeddings(self._target, outputs, ran) if merged else None
        if not asked and "hidden_states" in outputs:
            outputs["hidden_states"] = None
        self.hand_on(features, embeddings)
        if self.request.pause is not None and self._next + 1 < self._prompt.shape[1]:
            self.request.pause(self)
        return outputs

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """Return False, so that `_prefill` does not compile the forward, which would bypass this proxy."""
        return False

    def hand_on(self, features: Tensor, embeddings: Tensor | None) -> None:
        """Hand the drafter the features [B, C, F] of the next C slots, but for the last one.

        With `embeddings` [B, C, E] of what the target read there, if that was not the prompt's ids.
        """
        if self.last is not None:
            features = torch.cat([self.last.to(features.device), features], dim=1)
        if self._next + features.shape[1] > self._prompt.shape[1]:
            raise ValueError(_NOT_THE_PROMPT)
        self.last = features[:, -1:].clone()  # else those of all would stay
        ready = features.shape[1] - 1
        if ready == 0:
            return
        slots = slice(self._next + 1, self._next + 1 + ready)
        # Rows begin after their padding; no entry is left over where the longest of them has none.
        skipped = (self._pads - self._next).clamp(0, ready)
        counts = ready - skipped
        entries = (torch.arange(int(counts.max())) + skipped[:, None]).clamp(max=ready - 1)
        next_tokens = self._prompt[:, slots] if embeddings is None else embeddings[:, -ready:]
        for first in range(0, entries.shape[1], AT_ONCE):
            piece = entries[:, first : first + AT_ONCE]
            taken = (counts - first).clamp(0, piece.shape[1])
            self.tail = Verified(entries_of(features, piece), entries_of(next_tokens, piece), taken)
            self.request.drafter.extend(self.state, *self.tail)
        self._next += ready

    def prefill(self) -> None:
        """Run stock's prefill (prefix reuse, chunks) with this proxy in the model's place."""
        request, target = self.request, self._target
        ids, kwargs = request.input_ids, dict(request.model_kwargs)
        self.outputs = outputs = type(target)._prefill(self, ids, request.generation_config, kwargs)
        grown = torch.cat([ids, ids.new_zeros(len(ids), 1)], dim=1)  # by any token
        inputs, _ = next_inputs(target, grown, outputs, kwargs)
        self.extra_inputs = {name: inputs[name] for name in extra_inputs(target, inputs)}
        self.shift = position_shift(target, inputs.get("position_ids"), request.pads, request.total)
        if self.last is None or self._next + 1 != self._prompt.shape[1]:
            raise ValueError(_NOT_THE_PROMPT)


def reads_in_pieces(request: Request) -> bool:
    """Return True if a prompt may be read in pieces of any size, with the same outcome.

    Running states are read whole, as most targets begin a piece of several tokens without the state before it; and so
    are prompts past a length at which rotary frequencies change, as earlier pieces would have been read with others.
    """
    turn, _ = rotary_turn(request.model)
    return not (
        request.generation_config.prefill_chunk_size is not None
        or request.multimodal
        or request.prompt.is_floating_point()
        or (turn is not None and request.total > turn)
        or any(map(keeps_states, request.stock_cache.layers))
    )


def in_pieces(request: Request, size: int, pause: Callable[[PromptReader], None], shared: int = 0) -> Request:
    """Let a long prompt be read at most `size` tokens at a time, with `pause` called in between, where it may be.

    A piece ends after the first `shared` tokens of the prompt, or as few tokens before as there are pieces.
    """
    ahead = shared - request.cached
    if ahead > 0:
        size = ahead // -(-ahead // size)
    # See _NOT_THE_PROMPT.
    after_cache = request.cached == 0 or Version(transformers.__version__) >= Version("5.21.0.dev0")
    if request.total - request.cached <= size or not after_cache or not reads_in_pieces(request):
        return request
    config = copy(request.generation_config)
    config.prefill_chunk_size = size
    return replace(request, generation_config=config, pause=pause)


def begun(request: Request, rows: Rows) -> DrafterState:
    """Return a new state of the drafter, which has read what comes before the first position that will be run."""
    state = request.drafter.begin(len(rows), request.total + min(rows.room(0), _HEADROOM))
    # Tokens before the prompt are unknown if the cache has entries that were never passed as ids.
    known = request.total - request.prompt.shape[1]
    last = [max(pad, request.cached) - known for pad in request.pads]  # of the prompt's own slots
    first = torch.tensor([max(pad - known, 0) for pad in request.pads])
    counts = torch.tensor(last) - first + 1
    entries = (first[:, None] + torch.arange(int(counts.max()))).clamp(max=max(last))
    request.drafter.read_first(state, entries_of(request.prompt, entries), counts)
    return DrafterState(state, request.cached, request.pads)


def read_prompt(
    request: Request, rows: Rows, drafter_state: DrafterState
) -> tuple[PromptReader, list[MaskKind], TargetCache]:
    """Run the prompt through the target, by stock's prefill, and through the drafter.

    Returned are the reader that handed it on, the kinds of masks, and the cache that takes over from stock's.
    """
    model = request.model
    reader = PromptReader(request, drafter_state.state)
    reader.prefill()
    if reader.shift is not None and bool(reader.shift.any()):
        refuse_crossing(model, 0, 0, request.most, max(int(reader.shift.max()), 0))
    # Some layers get their class only when first used, and Phi-3 takes a new cache for long prompts.
    stock = refuse_cache(cache_after(model, reader.outputs, request.stock_cache))
    refuse_compressed(stock, request.total)
    kinds = mask_kinds(model, stock)
    nodes = request.tree_config.resolve_nodes(len(rows), request.device.type)
    windows = layer_windows(model, stock) if request.windowed else None
    capacity = request.total + min(rows.room(0), _HEADROOM) + nodes
    lend = request.users_cache and request.windowed and not any(request.pads)
    keep, most = request.returns_cache, request.most + nodes
    cache = TargetCache(stock, request.pads, capacity, keep, most, windows, lend)
    refuse_extra_inputs(model, cache, kinds, reader.shift, reader.extra_inputs)
    return reader, kinds, cache


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
