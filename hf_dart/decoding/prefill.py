"""Stock prefill, read by the drafter chunk by chunk, and the session that rounds go on with (`prefill`)."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_dart.cache.stock_layers import undone_on_failure
from hf_dart.cache.target_cache import TargetCache
from hf_dart.decoding.drafter_runner import DrafterRunner
from hf_dart.decoding.grow import TreeGrower
from hf_dart.decoding.noise import NoiseStream, put_back
from hf_dart.decoding.pace import Pace
from hf_dart.decoding.request import Request
from hf_dart.decoding.rows import Rows, Streaming
from hf_dart.decoding.session import HiddenStates, Noise, Session
from hf_dart.decoding.stats import DraftStats
from hf_dart.decoding.trace import Trace
from hf_dart.decoding.turns import DrafterState, resume_state
from hf_dart.decoding.walk import Walker
from hf_dart.drafters.base import Drafter
from hf_dart.drafters.proposal import AT_ONCE, Verified, entries_of
from hf_dart.models.devices import users_default
from hf_dart.models.features import features_request, gather_features, merged_embeddings, streams_of
from hf_dart.models.masks import MaskKind, layer_windows, mask_kinds
from hf_dart.models.positions import refuse_shifted
from hf_dart.models.processes import is_shared
from hf_dart.models.stock_steps import beside_text, cache_after, next_inputs, position_shift
from hf_dart.models.support import refuse_cache, refuse_compressed
from hf_dart.models.trial import refuse_what_matters
from hf_dart.models.verify import Verifier

# The first allocation of the key and value buffers reaches this far after the prompt; they double from there.
_HEADROOM = 512
# Each chunk of ids brings all embeddings in some releases of transformers, none in others.
_NOT_THE_PROMPT = (
    "generate runs over other positions than the prompt's, as it does with input_ids, inputs_embeds and "
    "prefill_chunk_size together, and before transformers 5.21 with prefill_chunk_size and a cached prefix; leave "
    "prefill_chunk_size out."
)


class PromptFeed:
    """Hands prompt positions to the drafter, each with the token after it.

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
        """The features [B, 1, F] of the prompt's last position.

        Raises:
            ValueError: there were fewer positions than the prompt has.
        """
        if self._last is None or self._next + 1 != self._prompt.shape[1]:
            raise ValueError(_NOT_THE_PROMPT)
        return self._last


class PrefillRecorder:
    """Stands in for the target during stock `_prefill` and hands on the features of every chunk.

    `_prefill` returns the last chunk's outputs only, and hooks on the target would be state that concurrent
    calls see; this proxy is neither.

    Attributes:
        width: how many positions the last chunk had.
        shift: `position_shift` of stock's first step after the prompt.
        beside: what stock hands the target in that step that is not text.
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
        self.beside: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, **inputs: Any) -> Any:
        merged = self._reads_embeddings and inputs.get("input_ids") is not None
        merged = merged and bool(beside_text(self._target, inputs))
        if not inputs.get("output_hidden_states"):
            inputs.update(features_request(sorted({*self._feature_layers, 0}) if merged else self._feature_layers))
        with users_default():
            outputs = self._target(**inputs)
        ran = inputs["inputs_embeds"][..., 0] if inputs.get("input_ids") is None else inputs["input_ids"]
        self.width = ran.shape[1]
        features = gather_features(outputs, self._feature_layers, ran, streams_of(self._target))
        self._feed(features, merged_embeddings(self._target, outputs, ran) if merged else None)
        return outputs

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """Asked by `_prefill` before it runs chunks; a compiled forward would pass this recorder by."""
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
        grown = torch.cat([input_ids, input_ids.new_zeros(len(input_ids), 1)], dim=1)  # by a token, whichever
        inputs, _ = next_inputs(self._target, grown, outputs, model_kwargs)
        self.beside = {name: inputs[name] for name in beside_text(self._target, inputs)}
        self.shift = position_shift(self._target, inputs.get("position_ids"), pads, total)
        return outputs


def prefill(request: Request, streamer: Any, noise: NoiseStream | None) -> tuple[Session, Tensor]:
    """Run the prompt through the target and the drafter.

    Should it fail, a cache that was passed in is as it was.

    Args:
        request: what `admit` let in.
        streamer: is told of every token.
        noise: that tokens are drawn with, not begun; None for greedy search.

    Returns:
        The session, which has seen the whole prompt but for the token after it, and the target's logits [B, 1, V] for
        that token.

    Raises:
        ValueError: the target turns out to keep a cache whose rounds cannot be undone.
    """
    config, batch = request.generation_config, len(request.input_ids)
    stats = DraftStats(trace=Trace(request.input_ids.shape[1]) if request.traced else None)
    rows = Rows(
        request.input_ids, request.model_kwargs.get("attention_mask"), config, request.criteria, request.in_step
    )
    aside = partial(put_back, rows.device) if noise is not None and rows.in_step else nullcontext
    if noise is not None:
        noise.begin()
    with stats.phase("prefill"):
        with aside():
            drafter_state = resume_state(
                request.stock_cache, request.drafter, request.input_ids, request.first_slot, request.pads
            )
            drafter_state = drafter_state or _begun(request, rows)
            drafter_state.sees |= request.sees
            ran = _run(request, rows, drafter_state)
        hidden_states = None
        if request.collects("output_hidden_states"):
            hidden_states = HiddenStates(ran.outputs.hidden_states, batch, ran.width, streams_of(request.model))
        verify = Verifier(
            request.model, ran.cache, ran.kinds, request.drafter.feature_layers, hidden_states is not None, ran.shift
        )
        request.drafter.lend(drafter_state.state, verify)
        logits = ran.outputs.logits[:, -1:].to(rows.device)
        if noise is not None:
            noise.vocab_size = logits.shape[-1]
        noise_ahead = _as_trees_see(noise, rows, request)
        streaming = Streaming(streamer, rows, drawn_ahead=bool(config.do_sample) and not rows.in_step)
        walk = Walker(
            request.processors,
            rows,
            streaming,
            noise,
            keep_scores=request.collects("output_scores"),
            keep_logits=request.collects("output_logits"),
        )
        depth = min(request.tree_config.depth or request.drafter.draft_length, request.drafter.draft_length)
        # What one of the processes that share a target learnt from a call that broke off in it, the others did not.
        records = None if is_shared(request.model) else request.drafter.pace_records
        pace = Pace(request.tree_config, rows.device.type, batch, depth, request.timed, records, request.kind)
        grower = TreeGrower(
            request.drafter, request.tree_config, request.processors, rows.tokens, rows.device, rows.eos, pace.cost
        )
        drafter_runner = DrafterRunner(
            request.drafter,
            drafter_state,
            request.drafter.propose_ranked,
            grower.depth,
            lambda level, scores: grower.score(scores, noise_ahead(level, 1)),
            rows,
            aside,
            keeps=pace.ever_drafts or request.returns_cache,
        )
    # The prompt's last position waits for the token after it.
    waiting = Verified(ran.features, request.input_ids.new_zeros(batch, 1), torch.ones(batch, dtype=torch.long))
    session = Session(
        request=request,
        rows=rows,
        streaming=streaming,
        stats=stats,
        pace=pace,
        drafter_runner=drafter_runner,
        grower=grower,
        verify=verify,
        cache=ran.cache,
        own_cache=ran.cache,
        walk=walk,
        noise=noise,
        noise_ahead=noise_ahead,
        stock_cache=ran.stock,
        vocab_size=logits.shape[-1],
        hidden_states=hidden_states,
        seen=waiting,
    )
    return session, logits


class _Prefilled(NamedTuple):
    """What comes of stock's prefill.

    Attributes:
        outputs: of the last chunk, which had `width` positions.
        features: [B, 1, F] of the last position.
        shift: [..., B] how far positions that the target is told lie above a row's own; None if nowhere.
        kinds: of masks.
        stock: stock's cache.
        cache: the one that takes over from it.
    """

    outputs: Any
    width: int
    features: Tensor
    shift: Tensor | None
    kinds: list[MaskKind]
    stock: Cache
    cache: TargetCache


def _begun(request: Request, rows: Rows) -> DrafterState:
    """A new state of the drafter, which has read what comes before the first position that will be run."""
    state = request.drafter.begin(len(rows), request.total + min(rows.room(0), _HEADROOM))
    # Slots before those of the prompt are not known where a cache holds what was never handed in as ids.
    known = request.total - request.prompt.shape[1]
    last = [max(pad, request.cached) - known for pad in request.pads]  # of the prompt's own slots
    first = torch.tensor([max(pad - known, 0) for pad in request.pads])
    counts = torch.tensor(last) - first + 1
    entries = (first[:, None] + torch.arange(int(counts.max()))).clamp(max=max(last))
    request.drafter.read_first(state, entries_of(request.prompt, entries), counts)
    return DrafterState(state, request.cached, request.pads)


def _run(request: Request, rows: Rows, drafter_state: DrafterState) -> _Prefilled:
    """Stock's prefill, and the cache that takes over from it."""
    model, batch, layers = request.model, len(rows), request.drafter.feature_layers
    tail = request.prompt[:, request.cached - request.total :]
    if request.sees and not tail.is_floating_point():
        # Ids of images may have no embedding: such models read another token there, until they put the image's.
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
        # Some layers show their kind only when they are first used; and Phi-3 takes a new cache for long prompts.
        stock = refuse_cache(cache_after(model, outputs, request.stock_cache))
        refuse_compressed(stock, request.total)
        kinds = mask_kinds(model, stock)
        nodes = request.tree_config.resolve_nodes(batch, rows.device.type)
        # Shapes of the engine are those of the whole text.
        windows = layer_windows(model, stock) if request.drafter.engine is None else None
        capacity = request.total + min(rows.room(0), _HEADROOM) + nodes
        cache = TargetCache(stock, request.pads, capacity, request.returns_cache, request.most + nodes, windows)
        refuse_what_matters(model, cache, kinds, recorder.shift, recorder.beside)
    return _Prefilled(outputs, recorder.width, last, recorder.shift, kinds, stock, cache)


def _as_trees_see(noise: NoiseStream | None, rows: Rows, request: Request) -> Noise:
    """The Gumbel noise [B, depth, V] of tokens from `start` places after the text on, where trees may see it."""

    def ahead(start: int, depth: int) -> Tensor | None:
        if noise is None or not request.tree_config.shared_noise:
            return None
        return noise.gumbel([emitted + start for emitted in rows.emitted], depth)

    return ahead
