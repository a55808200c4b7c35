"""`DartCandidateGenerator`: chains of drafts inside transformers' own assisted decoding loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    PreTrainedModel,
    StaticCache,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import CandidateGenerator

from hf_dart.cache.stock_layers import keeps_states, slots_of
from hf_dart.decoding.request import left_padding, refuse_options
from hf_dart.decoding.stats import DraftStats
from hf_dart.drafters.base import Drafter, Proposal
from hf_dart.models.devices import host_by_default
from hf_dart.models.positions import position_limit, refuse_crossing
from hf_dart.models.stock_steps import cache_name, extra_inputs
from hf_dart.models.support import refuse_cache, refuse_target
from hf_dart.models.verify import features_request, gather_features
from hf_dart.trees.vocabulary import spread

_KEEPS_STATE = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


class DartCandidateGenerator(CandidateGenerator):
    """A drafter's chains as candidates for stock's `_assisted_decoding`.

    Use it by `model.generate(..., custom_generate=DartCandidateGenerator.stock_loop(head))`. Greedy text is stock's
    token for token. Sampled text has stock's distribution, but is another text for the same seed: drafts are drawn from
    q with the call's own processors, and `get_candidates` returns q, as rejection sampling needs. hf_dart's own loop
    (`assistant=head`) verifies trees and equals stock for the same seed; this one is for targets and attention
    that take no tree mask. Config and processors are those of the call as `generate` prepared it, and the prompt begins
    with so many left `pads`.
    """

    requires_model_outputs = True

    def __init__(
        self, drafter: Drafter[Any], target: PreTrainedModel, generation_config: Any, processors: Any, pads: int
    ) -> None:
        self.model_kwargs_overrides = features_request(drafter.feature_layers)
        self.stats = DraftStats()
        self._drafter, self._processors, self._pads = drafter, processors, pads
        self._depth = drafter.tree_config.resolve_depth(drafter.draft_length)
        self._last_position = position_limit(target)
        self._cache_name = cache_name(target)
        self._max_length = int(generation_config.max_length)
        self._do_sample = bool(generation_config.do_sample)
        eos = generation_config._eos_token_tensor
        self._eos = set() if eos is None else set(eos.tolist())
        self._state: Any = None
        self._drafted = 0

    @staticmethod
    def stock_loop(drafter: Drafter[Any], streamer: Any = None) -> Callable[..., Any]:
        """Return a callable for `custom_generate=`: the stock loop with this drafter's candidates.

        Nothing is put on the model, so that calls in several threads do not meet.

        Args:
            drafter: a [`DartHead`] or another drafter for the model.
            streamer: the one that `generate` was given too; transformers hands it the prompt, but does not pass it
                on to a callable.

        Returns:
            The callable; what stock's loop cannot draft exactly (stop strings, batches) raises a `ValueError` in it.
        """
        return functools.partial(_assisted_decoding, drafter=drafter, streamer=streamer)

    def get_candidates(
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        model_outputs: Any,
        is_first_iteration: bool,
        n_last_matches: int | Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Draft after `input_ids` [1, T], the last of which the target has not read yet.

        Of the candidates in the target's last forward, `n_last_matches` were kept. Returned are [1, T + k] ids, and the
        logits [1, k, V] that the k drafts were drawn with; none of those if nothing was drawn by chance.
        """
        if is_first_iteration:
            return input_ids, None  # features come with the target's first forward
        with self.stats.phase("draft"):
            return self._draft(input_ids, model_kwargs, model_outputs, int(n_last_matches) + 1)

    def _draft(
        self, ids: Tensor, model_kwargs: dict[str, Any], outputs: Any, kept: int
    ) -> tuple[Tensor, Tensor | None]:
        skipped, positions = 0, outputs.logits.shape[1]  # rejected drafts among them
        if self._state is None:
            refuse_cache(model_kwargs[self._cache_name])  # some layers get their class only when first used
            self._state = self._drafter.begin(1, ids.shape[1])  # it grows
            first = ids[:, self._pads : self._pads + 1]
            self._drafter.read_first(self._state, first, torch.ones(1, dtype=torch.long))
            kept = positions = ids.shape[1] - 1
            skipped = self._pads
        features = gather_features(outputs, self._drafter.feature_layers, ids.new_empty(1, positions))
        features, tokens = features[:, skipped:kept], ids[:, skipped - kept :]
        counts = torch.tensor([kept - skipped])
        room = self._max_length - ids.shape[1] - 1  # the target adds one token of its own
        ahead = self._last_position - (ids.shape[1] - 1 - self._pads)
        depth = min(self._depth, room if ahead < 0 else min(room, ahead))
        if depth <= 0:
            self._drafter.extend(self._state, features, tokens, counts)
            return ids, None
        proposal = self._drafter.propose(self._state, features, tokens, counts, depth)
        return (ids, None) if proposal is None else self._draw(ids, proposal, outputs.logits.shape[-1])

    def _draw(self, ids: Tensor, proposal: Proposal, vocab_size: int) -> tuple[Tensor, Tensor | None]:
        """Return a chain after `ids` [1, T], up to its first end token, drawn with the call's processors."""
        proposal = proposal.within(vocab_size)
        # Stock's processors look at the whole vocabulary.
        logits = spread(proposal.logits.float(), proposal.vocabulary, vocab_size)
        ranked, candidates = logits.topk(min(self._drafter.tree_config.top_k, logits.shape[-1]))
        mass = logits.logsumexp(-1, keepdim=True)
        table = self._drafter.transitions(proposal, ids[:, -1].to(logits.device), candidates, ranked - mass)
        if table is not None:
            table = (table + mass[..., None]).to(ids.device)  # back to the size of logits, which penalties look at
        logits, candidates = logits.to(ids.device, copy=True), candidates.to(ids.device)
        front: int | None = 0  # the candidate in front, if the token there is one
        used = 0
        for scores, likely in zip(logits.unbind(1), candidates.unbind(1), strict=True):
            if table is not None and front is not None:
                scores.scatter_(1, likely, table[:, used, front])
            scores.copy_(self._processors(ids, scores))
            if self._do_sample:
                token = torch.multinomial(scores.softmax(-1), num_samples=1)
            else:
                token = scores.argmax(-1, keepdim=True)
            ids = torch.cat([ids, token], dim=-1)
            used += 1
            if int(token) in self._eos:
                break
            place = (likely[0] == token[0]).nonzero()
            front = int(place[0]) if len(place) else None
        self._drafted = used
        return ids, logits[:, :used] if self._do_sample else None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int | Tensor) -> None:
        """Count a finished round of stock's loop in the drafter's statistics."""
        if self._state is not None:
            self.stats.count([int(num_matches) + 1], [self._drafted])
        self._drafted = 0


class _WithCandidates:
    """Proxy of the target in one run of the stock loop; only the choice of a candidate generator is its own."""

    def __init__(self, target: PreTrainedModel, generator: DartCandidateGenerator) -> None:
        self._target, self._generator = target, generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._target(**inputs)

    def _get_candidate_generator(self, **inputs: Any) -> DartCandidateGenerator:
        return self._generator


@host_by_default
def _assisted_decoding(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    drafter: Drafter[Any],
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """`type(model)._assisted_decoding` with candidates of `drafter`; as stock returns it."""
    given = input_ids, logits_processor, stopping_criteria, generation_config
    _refuse(model, *given, model_kwargs)
    drafter.check_target(model)
    total = input_ids.shape[1]
    pads = left_padding(model_kwargs.get("attention_mask"), total, 1)[0]
    positions = model_kwargs.get("position_ids")
    if positions is not None and bool((positions[..., -1:] != total - pads - 1).any()):
        raise ValueError(
            "transformers' assisted loop takes usual position_ids alone; leave them or custom_generate= out."
        )
    generator = DartCandidateGenerator(drafter, model, generation_config, logits_processor, pads)
    proxy = _WithCandidates(model, generator)
    result = type(model)._assisted_decoding(proxy, *given, streamer=streamer, **model_kwargs)
    drafter.last_stats = generator.stats
    return result


def _refuse(
    model: PreTrainedModel, input_ids: Tensor, processors: Any, criteria: Any, config: Any, kwargs: dict[str, Any]
) -> None:
    refuse_target(model)
    if model.training:  # chains have no trial, which would show what train mode changes
        raise ValueError("The target is in train mode, where chains are not tried out; call model.eval() first.")
    refuse_options(model, config, input_ids, False, kwargs)
    refuse_crossing(model, input_ids.shape[1], 0, config.max_length)
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        raise ValueError("assistant_ensemble_weight trades exactness for speed; leave it or custom_generate= out.")
    cache, extra = refuse_cache(kwargs.get(cache_name(model))), extra_inputs(model, kwargs)
    overshot = [type(one).__name__ for one in criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)]
    disturbed = [
        kind.__name__
        for kind in map(type, processors)
        if kind in _KEEPS_STATE or not kind.__module__.startswith("transformers.")
    ]
    lengths = {one.max_length for one in criteria if type(one) is MaxLengthCriteria}
    enders = {int(token) for one in criteria if type(one) is EosTokenCriteria for token in one.eos_token_id}
    eos = config._eos_token_tensor
    ends = eos is not None and bool(torch.isin(input_ids[0, -1:], eos.to(input_ids.device)))
    differs = {
        "runs one row at a time": len(input_ids) > 1,
        "needs token ids": kwargs.get("inputs_embeds") is not None,
        f"does not hand on {' and '.join(extra)} as a plain call does": bool(extra),
        "cannot take back drafts from a running state or a static cache": model._is_stateful
        or isinstance(cache, StaticCache)
        or any(map(keeps_states, cache.layers)),
        "reads the whole prompt again after a cached prefix": slots_of(cache) > 0,
        "gives hidden states to the drafter only": bool(config.output_hidden_states),
        f"asks {', '.join(overshot)} once a round and runs past it": bool(overshot),
        "drafts past a MaxLengthCriteria or EosTokenCriteria of your own (give max_length= and eos_token_id=)": lengths
        != {config.max_length}
        or enders != (set() if eos is None else set(eos.tolist())),
        f"calls {', '.join(disturbed)} on rejected drafts too": bool(disturbed),
        "stops at once, in some releases, after a prompt that ends in an end token": ends,
    }
    for what, applies in differs.items():
        if applies:
            raise ValueError(
                f"transformers' assisted loop {what}; use hf_dart's own (assistant= in place of custom_generate=), or "
                "generate without drafts."
            )
