"""The round: propose, grow, verify, walk, commit, until every row has ended."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_dart.configuration import TreeConfig
from hf_dart.generation.cache import tree_cache
from hf_dart.generation.candidates import Ranker, seen_tokens
from hf_dart.generation.noise import MAX_LEAD, NoiseStream
from hf_dart.generation.options import left_padding, refuse_cache, refuse_options
from hf_dart.generation.prefill import PrefillRecorder, PromptFeed
from hf_dart.generation.probe import prove
from hf_dart.generation.rows import Rows, Streaming
from hf_dart.generation.stats import DraftStats
from hf_dart.generation.verify import Verifier, mask_kinds
from hf_dart.generation.walk import Accepted, Walker
from hf_dart.lookup import Graft, RowLookup
from hf_dart.proposal import Drafter, Proposal
from hf_dart.tree import DraftTree, Transitions, grow_tree

# The first allocation of the key and value buffers reaches this far behind the prompt; they double from there.
_HEADROOM = 512
# Tokens fed at once when rows that ended early are filled up for a cache that is handed back.
_FILL = 64


@dataclass
class DartGenerateOutput(GenerateDecoderOnlyOutput):
    """Stock's output and, in `draft_stats`, what the drafter did."""

    draft_stats: DraftStats | None = None


@torch.no_grad()
def speculative_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    assistant: Drafter[Any],
    tree_config: TreeConfig | None = None,
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
        model_kwargs: the prepared keyword arguments of the target's forward, its cache among them.

    Returns:
        [B, P + T] token ids, or a [`DartGenerateOutput`] with `return_dict_in_generate=True`; both as stock.

    Raises:
        ValueError: something was asked for that could not equal stock's output.
    """
    prove(model)
    refuse_options(generation_config, logits_processor, input_ids, synced_gpus, model_kwargs)
    assistant.check_target(model)
    rows = Rows(input_ids, model_kwargs.get("attention_mask"), generation_config, stopping_criteria)
    noise = None
    stats = DraftStats()
    streaming = Streaming(streamer, rows)
    try:
        with stats.phase("prefill"):
            call = _Call(model, assistant, tree_config or assistant.tree_config, generation_config, logits_processor)
            logits, features = call.prefill(input_ids, rows, model_kwargs)
            noise = call.noise
        tree = DraftTree.chain(input_ids[:, -1:])
        accepted = call.walk(tree, logits, call.limits())
        streaming.send()
        while not rows.finished:
            with stats.phase("draft"):
                proposal = call.propose(features, accepted)
            with stats.phase("grow"):
                limits = call.limits()
                tree = call.grow(proposal, limits)
            with stats.phase("verify"):
                logits, features = call.verify(tree, limits)
            with stats.phase("walk"):
                accepted = call.walk(tree, logits, limits)
            with stats.phase("commit"):
                call.cache.commit(accepted.path, accepted.counts)
                stats.count(accepted.counts, limits, tree.size)
                streaming.send()
    finally:
        # Where stock would have left the generator at this very token, also if the call was broken off.
        if noise is not None:
            noise.leave_as_stock(rows.steps)
    streaming.end()
    assistant.last_stats = stats
    return call.result(stats)


class _Call:
    """The parts of one `generate` call and what passes between them."""

    def __init__(
        self, model: Any, drafter: Drafter[Any], config: TreeConfig, generation_config: Any, processors: Any
    ) -> None:
        self.model, self.drafter, self.config = model, drafter, config
        self.generation_config, self.processors = generation_config, processors
        self.depth = min(config.depth or drafter.draft_length, drafter.draft_length)
        self.rank = Ranker(processors, config.top_k)
        self.noise: NoiseStream | None = None
        self.proposal: Proposal | None = None

    def prefill(self, input_ids: Tensor, rows: Rows, model_kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Stock prefill; logits [B, 1, V] and features [B, 1, F] of the last prompt position."""
        config, batch = self.generation_config, len(rows)
        stock = refuse_cache(model_kwargs.get("past_key_values"))
        cached = stock.get_seq_length()
        mask = model_kwargs.get("attention_mask")
        total = max(input_ids.shape[1], mask.shape[1] if mask is not None else getattr(config, "_mask_length", 0))
        pads = left_padding(mask, model_kwargs.get("position_ids"), total, batch)
        headroom = min(rows.room(0), _HEADROOM)

        self.rows = rows
        self.lookups = [RowLookup(tokens) for tokens in rows.tokens]
        self.state = self.drafter.begin(batch, total + headroom)
        feed = PromptFeed(
            self.drafter, self.state, input_ids[:, cached - total :], [max(pad - cached, 0) for pad in pads]
        )
        layers = self.drafter.feature_layers
        outputs = PrefillRecorder(self.model, feed, layers).prefill(input_ids, config, model_kwargs)
        refuse_cache(stock)  # some layers show their kind only when they are first used
        assert feed.last is not None

        self.returns_cache = bool(config.return_dict_in_generate or getattr(stock, "_is_user_defined", False))
        self.stock_cache = stock
        kinds = mask_kinds(self.model, stock)
        self.cache = tree_cache(stock, pads, total + headroom, keep=self.returns_cache)
        self.first_lengths = self.cache.lengths
        self.verify = Verifier(self.model, self.cache, kinds, layers)
        logits = outputs.logits[:, -1:].to(rows.device)
        if config.do_sample:
            self.noise = NoiseStream(batch, logits.shape[-1], rows.device)
        collect = bool(config.return_dict_in_generate)
        self.walk = Walker(
            self.processors,
            rows,
            self.noise,
            keep_scores=collect and bool(config.output_scores),
            keep_logits=collect and bool(config.output_logits),
        )
        return logits, feed.last

    def limits(self) -> list[int]:
        """Tokens that each row may emit in the coming round; 0 if it has ended or is too far ahead."""
        rows = self.rows
        rooms = [rows.room(row) if rows.active(row) else 0 for row in range(len(rows))]
        if self.noise is None or rows.finished:
            return rooms
        end = rows.slowest() + MAX_LEAD
        self.noise.forget_before(rows.slowest())
        return [min(room, end - emitted) for room, emitted in zip(rooms, rows.emitted, strict=True)]

    def propose(self, features: Tensor, accepted: Accepted) -> Proposal:
        """Hand the accepted positions to the drafter, each with the token behind it; it drafts on."""
        width = max(1, *accepted.counts)
        path = accepted.path[:, :width].to(features.device)
        proposal = self.drafter.propose(
            self.state,
            features.gather(1, path[..., None].expand(-1, -1, features.shape[-1])),
            self.rows.recent(accepted.counts, width),
            torch.tensor(accepted.counts),
            self.depth,
        )
        if self.proposal is not None and 0 in accepted.counts:
            # Rows that stood still keep their draft.
            proposal = proposal.where(torch.tensor(accepted.counts) > 0, self.proposal)
        self.proposal = proposal
        return proposal

    def grow(self, proposal: Proposal, limits: list[int]) -> DraftTree:
        """Rank the draft's tokens, with the noise they will be drawn with, and grow the tree."""
        rows, logits = self.rows, proposal.logits
        gumbel = None
        if self.noise is not None and self.config.shared_noise:
            gumbel = self.noise.gumbel(rows.emitted, self.depth)
        seen = None
        if self.rank.needs_history:
            seen = seen_tokens(rows.ids_at_length_of(rows.emitted.index(max(rows.emitted))), logits.shape[-1])
        candidates, scores = (ranked.to(rows.device) for ranked in self.rank(logits, gumbel, seen))
        roots = rows.recent([1] * len(rows), 1)
        graft = None
        if self.config.lookup:
            graft = Graft.find(self.lookups, min(self.config.lookup, max(limits)), rows.device)
        if graft is not None:
            candidates, scores = graft.extend(candidates, scores)
        scorer = self.scorer(proposal, roots[:, 0], candidates, scores, graft)
        # A path of k drafts emits k + 1 tokens.
        deepest = [min(limit - 1, room) for limit, room in zip(limits, self.verify.depth_room(), strict=True)]
        return grow_tree(
            roots,
            candidates,
            scores,
            nodes=self.config.resolve_nodes(len(rows), rows.device.type, graft.length if graft else 0),
            beam=self.config.beam,
            depth_limit=torch.tensor(deepest, device=rows.device) if min(deepest) < candidates.shape[1] else None,
            scorer=scorer,
        )

    def scorer(
        self, proposal: Proposal, roots: Tensor, candidates: Tensor, scores: Tensor, graft: Graft | None
    ) -> Transitions | None:
        """What makes a candidate depend on the one in front of it: the drafter's selector, copied text."""
        drafted = slice(0, self.depth)
        table = self.drafter.transitions(proposal, roots, candidates[:, drafted], scores[:, drafted])
        if table is None and graft is None:
            return None
        width, deeper = candidates.shape[2], candidates.shape[1] - self.depth
        if table is None:
            table = scores[:, :, None].expand(-1, -1, width, -1)
        elif deeper > 0:
            table = torch.nn.functional.pad(table, (0, 0, 0, 0, 0, deeper), value=-inf)
        return Transitions(table if graft is None else graft.boost(candidates, table))

    def result(self, stats: DraftStats) -> Tensor | DartGenerateOutput:
        """What `generate` returns; a cache that outlives the call is laid in stock's slots."""
        sequences = self.rows.sequences()
        if self.returns_cache:
            self.level_rows(sequences)
            self.cache.write_back()
        if not self.generation_config.return_dict_in_generate:
            return sequences
        return DartGenerateOutput(
            sequences=cast(torch.LongTensor, sequences),
            scores=_tuple(self.walk.scores),
            logits=_tuple(self.walk.logits),
            past_key_values=self.stock_cache,
            draft_stats=stats,
        )

    def level_rows(self, sequences: Tensor) -> None:
        """Bring every row to where stock's cache ends, one token short of `sequences`.

        Stock runs the pad tokens behind a row's end through the model too.
        """
        wanted = self.first_lengths + self.rows.steps - 1
        self.cache.truncate(wanted)
        while int((wanted - self.cache.lengths).max()) > 0:
            counts = (wanted - self.cache.lengths).clamp(max=_FILL)
            nodes = torch.arange(int(counts.max()))
            starts = self.rows.prompt_length + self.cache.lengths - self.first_lengths
            columns = (starts[:, None] + nodes).clamp(max=sequences.shape[1] - 1).to(sequences.device)
            self.verify(DraftTree.chain(sequences.gather(1, columns), counts.to(sequences.device)), counts.tolist())
            self.cache.commit(nodes.expand(len(self.rows), -1), counts.tolist())


def _tuple(tensors: list[Tensor] | None) -> Any:
    return None if tensors is None else tuple(tensors)
