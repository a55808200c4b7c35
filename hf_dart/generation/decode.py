"""The round: propose, grow, verify, walk, commit, until every row has ended."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_dart.configuration import TreeConfig
from hf_dart.devices import host_by_default
from hf_dart.features import row_axis, states_at
from hf_dart.generation.cache import tree_cache
from hf_dart.generation.grow import TreeGrower
from hf_dart.generation.noise import MAX_LEAD, NoiseStream, put_back
from hf_dart.generation.options import (
    left_padding,
    refuse_cache,
    refuse_cache_length,
    refuse_compressed,
    refuse_drafter,
    refuse_options,
)
from hf_dart.generation.pace import CHAIN, Pace, shares
from hf_dart.generation.prefill import PrefillRecorder, PromptFeed
from hf_dart.generation.probe import prove
from hf_dart.generation.processors import needs_stocks_steps
from hf_dart.generation.rows import Rows, Streaming, length_limit
from hf_dart.generation.stats import DraftStats
from hf_dart.generation.stock_layers import undone_on_failure
from hf_dart.generation.trace import Trace
from hf_dart.generation.turns import Draft, leave, take_up
from hf_dart.generation.verify import Verifier, layer_windows, mask_kinds, refuse_crossing
from hf_dart.generation.walk import Accepted, Walker
from hf_dart.proposal import Drafter, Proposal, Verified
from hf_dart.trees.tree import DraftTree

# The first allocation of the key and value buffers reaches this far behind the prompt; they double from there.
_HEADROOM = 512
# Tokens fed at once when rows that ended early are filled up for a cache that is handed back.
_FILL = 64


@dataclass
class DartGenerateOutput(GenerateDecoderOnlyOutput):
    """Stock's output and, in `draft_stats`, what the drafter did."""

    draft_stats: DraftStats | None = None


@host_by_default
@torch.no_grad()
def speculative_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    assistant: Drafter[Any],
    tree_config: TreeConfig | None = None,
    refine: int | None = None,
    trace: bool = False,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor | DartGenerateOutput:
    """Decode with drafts: the callable behind `assistant=`, called by `generate` with all prepared.

    Args:
        model: the target.
        input_ids: [B, P] left-padded prompts, already expanded for `num_return_sequences`.
        assistant: the drafter.
        tree_config: replaces `assistant.tree_config` for this call.
        trace: keep every round and its tree in the statistics (`hf_dart.view` shows them); no engine takes part then.
        refine: replaces its `refine`: how often the drafter looks at its draft again before the tree grows.
        model_kwargs: the prepared keyword arguments of the target's forward, its cache among them.

    Returns:
        [B, P + T] token ids, or a [`DartGenerateOutput`] with `return_dict_in_generate=True`; both as stock.

    Raises:
        ValueError: something was asked for that could not equal stock's output.
    """
    tree_config = tree_config or assistant.tree_config
    if refine is not None:
        tree_config = replace(tree_config, refine=refine)
    if tree_config.refine and not assistant.refines:
        raise ValueError(
            f"This {type(assistant).__name__} does not refine its drafts; give refine=0, or a head that was trained "
            "with an editor."
        )
    length = length_limit(stopping_criteria, input_ids.shape[1])
    slots, mask = _slots(input_ids, length, generation_config, model_kwargs)[2], model_kwargs.get("attention_mask")
    padded = mask is not None and not bool(mask.all())
    prove(model, slots, max(tree_config.nodes or 0, _FILL), len(input_ids), padded)
    refuse_options(model, generation_config, input_ids, synced_gpus, model_kwargs)
    input_ids = input_ids.long()  # as stock's are once a token is added
    refuse_drafter(assistant)
    assistant.check_target(model)
    if tree_config.draft_cost is None:
        tree_config = replace(tree_config, draft_cost=assistant.draft_cost(model, tree_config.depth))
    in_step = needs_stocks_steps(logits_processor, stopping_criteria, generation_config)
    rows = Rows(input_ids, model_kwargs.get("attention_mask"), generation_config, stopping_criteria, in_step)
    stats = DraftStats(trace=Trace(input_ids.shape[1]) if trace else None)
    streaming = Streaming(streamer, rows, drawn_ahead=bool(generation_config.do_sample) and not in_step)
    call = Call(model, assistant, tree_config, generation_config, logits_processor, rows)
    try:
        with stats.phase("prefill"):
            logits, features = call.prefill(input_ids, streaming, model_kwargs)
        tree = DraftTree.chain(input_ids.new_zeros(len(rows), 1))  # a root that nobody looks at
        accepted = call.walk(tree, logits, call.limits())
        if assistant.engine is not None and not rows.finished and not trace:
            features, accepted = assistant.engine.decode(call, features, accepted, streaming, stats)
        while not rows.finished:
            features, accepted = call.round(features, accepted, stats)
        output = call.result(stats, features, accepted)
    except BaseException:
        call.break_off(streaming.position)
        raise
    streaming.end()
    assistant.last_stats = stats
    call.pace.tell(assistant)
    return output


class Call:
    """The parts of one `generate` call and what passes between them."""

    def __init__(
        self,
        model: Any,
        drafter: Drafter[Any],
        config: TreeConfig,
        generation_config: Any,
        processors: Any,
        rows: Rows,
    ) -> None:
        self.model, self.drafter, self.config = model, drafter, config
        self.generation_config, self.processors = generation_config, processors
        self.rows = rows
        self.noise: NoiseStream | None = None
        if generation_config.do_sample:
            self.noise = NoiseStream(len(rows), 0, rows.device, forecast=rows.in_step)
        self.prefilled = False
        self.proposal: Proposal | None = None
        self.pending: list[Verified] = []  # while drafting pauses
        self.ask = drafter.propose_ranked  # an engine may lend another way to the same

    def prefill(
        self, input_ids: Tensor, streaming: Streaming, model_kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Stock prefill; logits [B, 1, V] and features [B, 1, F] of the last prompt position.

        Should it fail, a cache that was passed in is as it was.
        """
        rows, config = self.rows, self.generation_config
        batch = len(rows)
        stock = refuse_cache(model_kwargs.get("past_key_values"))
        cached = int(stock.get_seq_length())
        mask = model_kwargs.get("attention_mask")
        prompt, total, most = _slots(input_ids, rows.max_length, config, model_kwargs)
        pads = left_padding(mask, model_kwargs.get("position_ids"), total, batch)
        refuse_crossing(self.model, pads, cached, total, most)
        capacity = total + min(rows.room(0), _HEADROOM)
        windows = layer_windows(self.model, stock)
        refuse_cache_length(stock, windows, cached, total - prompt.shape[1], total, most - 1)

        if self.drafter.engine is None and self.model._valid_auto_compile_criteria(model_kwargs, config):
            warnings.warn(
                "generate would compile the target for this static cache; drafted rounds run it eagerly, unless "
                "hf_dart.compile(model, head) was called.",
                stacklevel=2,
            )

        if self.noise is not None:
            self.noise.begin()
        self.pace = Pace(self.config, rows.device.type, self.drafter.draft_length > 0)
        self.grower = TreeGrower(self.drafter, self.config, self.processors, rows.tokens, rows.device)
        self.first_slot = total - input_ids.shape[1]  # of the tokens that are known
        with self.aside():
            draft = take_up(stock, self.drafter, input_ids, self.first_slot, pads)
            self.draft = draft or Draft(self.drafter.begin(batch, capacity), cached, pads)
        feed = PromptFeed(
            self.drafter, self.draft.state, prompt[:, cached - total :], [max(pad - cached, 0) for pad in pads]
        )
        layers = self.drafter.feature_layers
        self.returns_cache = bool(config.return_dict_in_generate or getattr(stock, "_is_user_defined", False))
        with undone_on_failure(stock), self.aside():
            recorder = PrefillRecorder(self.model, feed, layers)
            outputs = recorder.prefill(input_ids, config, model_kwargs, pads, total)
            # Some layers show their kind only when they are first used; and Phi-3 takes a new cache for long prompts.
            self.stock_cache = stock = refuse_cache(outputs.past_key_values)
            refuse_compressed(stock, total)
            kinds = mask_kinds(self.model, stock)
            nodes = self.config.resolve_nodes(batch, rows.device.type)
            # Shapes of the engine are those of the whole text.
            windowed = layer_windows(self.model, stock) if self.drafter.engine is None else None
            keep = self.returns_cache
            self.cache = tree_cache(stock, pads, capacity + nodes, keep, most + nodes, windowed)
        self.prefilled = True
        assert feed.last is not None
        collect = bool(config.return_dict_in_generate)
        self.hidden_states = [outputs.hidden_states] if collect and config.output_hidden_states else None
        keep = self.hidden_states is not None
        self.row_axes = [row_axis(states, batch, recorder.width) for states in outputs.hidden_states] if keep else []
        self.verify = Verifier(self.model, self.cache, kinds, layers, keep, recorder.shift)
        logits = outputs.logits[:, -1:].to(rows.device)
        self.vocab_size = logits.shape[-1]
        if self.noise is not None:
            self.noise.vocab_size = self.vocab_size
        self.walk = Walker(
            self.processors,
            rows,
            streaming,
            self.noise,
            keep_scores=collect and bool(config.output_scores),
            keep_logits=collect and bool(config.output_logits),
        )
        return logits, feed.last

    def aside(self) -> AbstractContextManager[None]:
        """Around what the drafter does, which may draw: where tokens are drawn as stock does, it moves nothing."""
        if self.noise is None or not self.rows.in_step:
            return nullcontext()
        return put_back(self.rows.device)

    def limits(self) -> list[int]:
        """Tokens that each row may emit in the coming round; 0 if it has ended or is too far ahead."""
        rows = self.rows
        rooms = rows.rooms
        if self.noise is None or rows.finished:
            return rooms
        end = rows.slowest() + MAX_LEAD
        self.noise.forget_before(rows.slowest())
        return [min(room, end - emitted) for room, emitted in zip(rooms, rows.emitted, strict=True)]

    def round(self, features: Tensor, accepted: Accepted, stats: DraftStats) -> tuple[Tensor, Accepted]:
        """One round behind a tree with `features` [B, N, F] of which something was `accepted`: both, of the next."""
        with stats.phase("draft"):
            proposal = self.propose(features, accepted)
        with stats.phase("grow"):
            limits = self.limits()
            tree = self.grow(proposal, limits)
        with stats.phase("verify"):
            logits, features = self.verify(tree, limits)
        with stats.phase("walk"):
            accepted = self.walk(tree, logits, limits)
        with stats.phase("commit"):
            self.commit(accepted)
            self.grower.learn(tree, accepted)
            stats.count(accepted.counts, limits, tree.size, self.pace.level)
            self.pace.count(accepted.counts, limits, tree.size)
        if stats.trace is not None:
            stats.trace.add(tree, accepted, stats.seconds)
        return features, accepted

    def propose(self, features: Tensor, accepted: Accepted) -> Proposal | None:
        """Hand the accepted positions to the drafter, each with the token behind it; None while drafting pauses."""
        if self.pace.ever_drafts or self.returns_cache:
            self.pending.append(self.verified(features, accepted))
        if not self.pace.drafting:
            return None
        taken, next_tokens, counts = _joined(self.pending)
        self.pending = []
        with self.aside():
            proposal = self.ask(self.draft.state, taken, next_tokens, counts, self.grower.depth, self.score)
        if proposal is not None and self.proposal is not None and not counts.all():
            # Rows that stood still keep their draft.
            proposal = proposal.where(counts > 0, self.proposal)
        if proposal is not None:
            self.hold_ended_rows(proposal)
        self.proposal = proposal
        return proposal

    def score(self, level: int, logits: Tensor) -> Tensor:
        """Log-scores of the logits [B, W, V] of depth `level`, as `Drafter.propose_ranked` asks for them."""
        return self.grower.score(logits, self.gumbel(level, 1))

    def gumbel(self, start: int, depth: int) -> Tensor | None:
        """[B, depth, V] the noise of the tokens from `start` places behind the text on; None if trees do not see it."""
        if self.noise is None or not self.config.shared_noise:
            return None
        return self.noise.gumbel([emitted + start for emitted in self.rows.emitted], depth)

    def verified(self, features: Tensor, accepted: Accepted) -> Verified:
        """The accepted positions: features [B, A, F], the tokens [B, A] behind them, and how many each row has [B]."""
        width = max(1, *accepted.counts)
        if features.shape[1] > 1:
            path = accepted.path[:, :width].to(features.device)
            features = features.gather(1, path[..., None].expand(-1, -1, features.shape[-1]))
        return (
            features,
            self.rows.recent(accepted.counts, width),
            torch.tensor(accepted.counts),
        )

    def grow(self, proposal: Proposal | None, limits: list[int]) -> DraftTree:
        """Grow the trees, ranked with the noise that their tokens will be drawn with."""
        gumbel = None if proposal is None else self.gumbel(0, self.grower.depth)
        # A path of k drafts emits k + 1 tokens.
        deepest = [min(limit - 1, room) for limit, room in zip(limits, self.verify.depth_room(), strict=True)]
        worth = shares(self.rows.emitted, limits)
        if proposal is None:
            return self.grower(None, gumbel, deepest, shares=worth)
        refine, chain = partial(self.refine, proposal), self.pace.level == CHAIN
        return self.grower(proposal.within(self.vocab_size), gumbel, deepest, refine, chain, worth)

    def refine(self, first: Proposal, tokens: Tensor) -> Proposal:
        """The draft behind a second look at `tokens` [B, d]."""
        with self.aside():
            proposal = self.drafter.refine(self.draft.state, first, tokens)
        self.hold_ended_rows(proposal)
        return proposal.within(self.vocab_size)

    def hold_ended_rows(self, proposal: Proposal) -> None:
        """Rows that are only filled up must not hold up the others."""
        if self.rows.in_step and self.rows.fills_up and True in self.rows.ended:
            proposal.make_certain(self.rows.ended, self.rows.pad)

    def commit(self, accepted: Accepted) -> None:
        """Keep what was accepted: cache entries, and hidden states if they were asked for."""
        self.cache.commit(accepted.path, accepted.counts)
        if self.hidden_states is None:
            return
        for nodes in accepted.path.T:
            layers = zip(self.verify.hidden_states, self.row_axes, strict=True)
            self.hidden_states.append(tuple(states_at(states, axis, nodes) for states, axis in layers))

    def result(self, stats: DraftStats, features: Tensor, accepted: Accepted) -> Tensor | DartGenerateOutput:
        """What `generate` returns; a cache that outlives the call is laid in stock's slots.

        Args:
            features, accepted: of the last round, whose positions the drafter has not taken in.
        """
        sequences = self.rows.sequences()
        if stats.trace is not None:
            stats.trace.end(self.rows.steps)
        self.leave_generator(self.rows.steps)
        if self.returns_cache:
            pending = [*self.pending, self.verified(features, accepted), *self.level_rows(sequences)]
            self.cache.write_back(self.rows.steps - 1)
            leave(self.stock_cache, self.drafter, self.draft, pending, self.first_slot, sequences.clone())
        if not self.generation_config.return_dict_in_generate:
            return sequences
        return DartGenerateOutput(
            sequences=cast(torch.LongTensor, sequences),
            scores=cast(Any, self.walk.scores),
            logits=cast(Any, self.walk.logits),
            hidden_states=None if self.hidden_states is None else cast(Any, tuple(self.hidden_states)),
            past_key_values=self.stock_cache,
            draft_stats=stats,
        )

    def level_rows(self, sequences: Tensor) -> Iterator[Verified]:
        """Bring every row to where stock's cache ends, one token short of `sequences`.

        Stock runs the pad tokens behind a row's end through the model too; these are the positions that come out.
        """
        prompt = self.cache.prompt_lengths
        wanted = prompt + self.rows.steps - 1
        self.cache.truncate(wanted)
        while int((wanted - self.cache.lengths).max()) > 0:
            counts = (wanted - self.cache.lengths).clamp(max=_FILL)
            nodes = torch.arange(int(counts.max()) + 1)
            starts = self.rows.prompt_length + self.cache.lengths - prompt
            columns = (starts[:, None] + nodes).clamp(max=sequences.shape[1] - 1).to(sequences.device)
            tokens = sequences.gather(1, columns)
            _, features = self.verify(DraftTree.chain(tokens[:, :-1], counts.to(tokens.device)), counts.tolist())
            self.cache.commit(nodes[:-1].expand(len(self.rows), -1), counts.tolist())
            yield features, tokens[:, 1:], counts

    def break_off(self, position: int) -> None:
        """Leave the generator, and a cache that was passed in, as stock would have after `position` tokens per row.

        The cache then holds the prompt and so much of those tokens as every row has committed.
        """
        self.leave_generator(position)
        if self.prefilled and getattr(self.stock_cache, "_is_user_defined", False):
            committed = int((self.cache.lengths - self.cache.prompt_lengths).min())
            with suppress(RuntimeError):  # out of memory once more: it keeps the prompt alone
                self.cache.write_back(max(min(committed, position - 1), 0))

    def leave_generator(self, position: int) -> None:
        """Leave the default generator as stock would have after `position` tokens per row."""
        if self.noise is not None and self.rows.in_step:  # tokens were drawn from it as they came
            self.noise.end()
        elif self.noise is not None:
            self.noise.leave_as_stock(position)


def _joined(chunks: list[Verified]) -> Verified:
    """One chunk of all, each row's real entries in front."""
    if len(chunks) == 1:
        return chunks[0]
    features, tokens = (torch.cat(parts, dim=1) for parts in list(zip(*chunks, strict=True))[:2])
    real = torch.cat([torch.arange(chunk[1].shape[1]) < chunk[2][:, None] for chunk in chunks], dim=1)
    order = real.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
    gathered = features.gather(1, order.to(features.device)[..., None].expand_as(features))
    return gathered, tokens.gather(1, order.to(tokens.device)), real.sum(1)


def _slots(input_ids: Tensor, length: int, config: Any, model_kwargs: dict[str, Any]) -> tuple[Tensor, int, int]:
    """The prompt (ids or embeddings); its slots, a cached prefix included; and those of all that may be generated."""
    mask, embeddings = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    prompt = input_ids if embeddings is None else embeddings
    total = max(prompt.shape[1], mask.shape[1] if mask is not None else getattr(config, "_mask_length", 0))
    return prompt, total, total + length - input_ids.shape[1]
