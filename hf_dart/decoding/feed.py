"""The prompt: stock's prefill, read by the drafter chunk by chunk, and the cache that takes over from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.cache.stock_layers import undone_on_failure
from hf_dart.cache.target_cache import TargetCache
from hf_dart.decoding.request import Request
from hf_dart.decoding.rows import Rows
from hf_dart.decoding.turns import DrafterState
from hf_dart.drafters.base import AT_ONCE, Drafter, entries_of
from hf_dart.models.devices import users_default
from hf_dart.models.positions import refuse_shifted
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


class PromptFeed:
    """Feed of prompt positions to the drafter, each with the token after it.

    The last position has no such token yet: its features wait for the first generated token (`finish`).

    Args:
        prompt: the ids [B, T] or embeddings [B, T, E] that prefill runs over (a cached prefix left out).
        pads: left padding of each row within them.
    """

    def __init__(self, drafter: Drafter[Any], state: Any, prompt: Tensor, pads: list[int]) -> None:
        self._drafter, self._state = drafter, state
        self._prompt = prompt
        self._pads = torch.tensor(pads)
        self._next = 0  # slot of the first position that was not handed on
        self._last: Tensor | None = None  # [B, 1, F]

    def __call__(self, features: Tensor, embeddings: Tensor | None = None) -> None:
        """Take in the features [B, C, F] of the next C slots.

        Args:
            embeddings: [B, C, E] what the target read there, in place of the prompt's ids.

        Raises:
            ValueError: there are more than the prompt has.
        """
        if self._last is not None:
            features = torch.cat([self._last.to(features.device), features], dim=1)
        if self._next + features.shape[1] > self._prompt.shape[1]:
            raise ValueError(_NOT_THE_PROMPT)
        self._last = features[:, -1:]
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
            self._drafter.extend(self._state, entries_of(features, piece), entries_of(next_tokens, piece), taken)
        self._next += ready

    def finish(self) -> Tensor:
        """Return the features [B, 1, F] of the prompt's last position.

        Raises:
            ValueError: there were fewer positions than the prompt has.
        """
        if self._last is None or self._next + 1 != self._prompt.shape[1]:
            raise ValueError(_NOT_THE_PROMPT)
        return self._last


class PrefillRecorder:
    """Proxy of the target during stock `_prefill`, which hands on the features of every chunk.

    `_prefill` returns the last chunk's outputs only, and hooks on the target would be state that concurrent
    calls see; this proxy is neither.

    Attributes:
        width: how many positions the last chunk had.
        shift: `position_shift` of stock's first step after the prompt.
        extra_inputs: what stock hands the target in that step that is not text.
    """

    def __init__(
        self, target: PreTrainedModel, feed: PromptFeed, feature_layers: list[int], reads_embeddings: bool
    ) -> None:
        self._target = target
        self._feed = feed
        self._feature_layers = feature_layers
        self._reads_embeddings = reads_embeddings
        self.width = 0
        self.shift: Tensor | None = None
        self.extra_inputs: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, **inputs: Any) -> Any:
        text_only = not extra_inputs(self._target, inputs)
        merged = self._reads_embeddings and inputs.get("input_ids") is not None and not text_only
        if not inputs.get("output_hidden_states"):
            # Towers of images would take indices of layers for theirs.
            inputs.update(features_request(self._feature_layers) if text_only else {"output_hidden_states": True})
        with users_default():
            outputs = self._target(**inputs)
        ran = inputs["inputs_embeds"][..., 0] if inputs.get("input_ids") is None else inputs["input_ids"]
        self.width = ran.shape[1]
        features = gather_features(outputs, self._feature_layers, ran)
        self._feed(features, merged_embeddings(self._target, outputs, ran) if merged else None)
        return outputs

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """Return False, so that `_prefill` does not compile the forward, which would bypass this recorder."""
        return False

    def prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], pads: list[int], total: int
    ) -> Any:
        """Stock prefill (prefix reuse, chunks) with this recorder in the model's place; its outputs.

        Args:
            pads: left padding of each row.
            total: slots of prompt and cached prefix.

        Raises:
            ValueError: stock's next step has positions that rounds cannot follow.
        """
        outputs = type(self._target)._prefill(self, input_ids, generation_config, model_kwargs)
        grown = torch.cat([input_ids, input_ids.new_zeros(len(input_ids), 1)], dim=1)  # by any token
        inputs, _ = next_inputs(self._target, grown, outputs, model_kwargs)
        self.extra_inputs = {name: inputs[name] for name in extra_inputs(self._target, inputs)}
        self.shift = position_shift(self._target, inputs.get("position_ids"), pads, total)
        return outputs


class Prefilled(NamedTuple):
    """Result of stock's prefill.

    Attributes:
        outputs: of the last chunk, which had `width` positions.
        features: [B, 1, F] of the last position.
        shift: [..., B] how far positions that the target is told lie above a row's own; None if nowhere.
        kinds: of masks.
        cache: takes over from stock's.
    """

    outputs: Any
    width: int
    features: Tensor
    shift: Tensor | None
    kinds: list[MaskKind]
    cache: TargetCache


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


def read_prompt(request: Request, rows: Rows, drafter_state: DrafterState) -> Prefilled:
    """Run the prompt through the target, by stock's prefill, and through the drafter.

    Should it fail, a cache that was passed in is as it was.

    Raises:
        ValueError: the target turns out to keep a cache whose rounds cannot be undone.
    """
    model, batch, layers = request.model, len(rows), request.drafter.feature_layers
    tail = request.prompt[:, request.cached - request.total :]
    if request.multimodal and not tail.is_floating_point():
        # Ids of images may have no embedding: such models look up another token there before inserting the image's.
        tail = torch.where(tail < model.get_input_embeddings().num_embeddings, tail, 0)
    pads = [max(pad - request.cached, 0) for pad in request.pads]
    feed = PromptFeed(request.drafter, drafter_state.state, tail, pads)
    with undone_on_failure(request.stock_cache):
        recorder = PrefillRecorder(model, feed, layers, request.drafter.reads_embeddings)
        outputs = recorder.prefill(
            request.input_ids, request.generation_config, dict(request.model_kwargs), request.pads, request.total
        )
        last = feed.finish()
        refuse_shifted(model, recorder.shift, request.most)
        # Some layers get their class only when first used, and Phi-3 takes a new cache for long prompts.
        stock = refuse_cache(cache_after(model, outputs, request.stock_cache))
        refuse_compressed(stock, request.total)
        kinds = mask_kinds(model, stock)
        nodes = request.tree_config.resolve_nodes(batch, rows.device.type)
        windows = layer_windows(model, stock) if request.windowed else None
        capacity = request.total + min(rows.room(0), _HEADROOM) + nodes
        cache = TargetCache(stock, request.pads, capacity, request.returns_cache, request.most + nodes, windows)
        refuse_extra_inputs(model, cache, kinds, recorder.shift, recorder.extra_inputs)
    return Prefilled(outputs, recorder.width, last, recorder.shift, kinds, cache)
