"""The round, and `Session`: the state of one call of `generate` from its first round to its last, and its output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_dart.cache.stock_layers import slots_of
from hf_dart.decoding.feed import begun, leave, read_prompt, resume_state
from hf_dart.decoding.grow import TreeGrower
from hf_dart.decoding.pace import Pace, row_weights
from hf_dart.decoding.request import FILL, Request
from hf_dart.decoding.rows import Rows
from hf_dart.decoding.stats import DraftStats, Trace
from hf_dart.decoding.walk import MAX_LEAD, Accepted, NoiseStream, Walker, put_back
from hf_dart.drafters.base import Drafter, Proposal, Verified, entries_of
from hf_dart.drafters.lookup import LookupDrafter
from hf_dart.models.features import states_at
from hf_dart.models.forwards import standing_in
from hf_dart.models.packed_weights import packed_drafts
from hf_dart.models.processes import is_shared
from hf_dart.models.stock_steps import CACHE
from hf_dart.models.verify import Verifier, row_axis
from hf_dart.trees.copies import Copies
from hf_dart.trees.tree import DraftTree


@dataclass(frozen=True)
class Budget:
    """Limits of the coming round."""

    limits: list[int]  # tokens that each row may emit; 0 if it has ended or is too far ahead
    deepest: list[int]  # deepest node of each row's tree: a path of k drafts emits k + 1 tokens
    weights: list[float]  # of a token more in each row (`pace.row_weights`)
    copies: Sequence[Copies]  # what may be copied in each row
    drafted: bool  # the drafter is asked for a draft


class Observer:
    """Listener to one call, of `Drafter.observers` or of a request; what it raises ends the call."""

    def verified(self, seen: Verified, logits: Callable[[], Tensor] | None) -> None:
        """Take note of verified positions, in their order; of a long prompt these are the last ones.

        `logits` returns those of the target there [B, A, V]; it is None for positions of the prompt.
        """

    def ended(self, finished: bool) -> None:
        """Take note of the end of the call; `finished` is False where an error ends it."""


class HiddenStates:
    """The hidden states that `output_hidden_states` asks for: of the prefill, then of one committed token at a time."""

    def __init__(self, of_prefill: tuple[Tensor, ...], rows: int, positions: int) -> None:
        self.steps = [of_prefill]
        self._axes = [row_axis(layer, rows, positions) for layer in of_prefill]

    def add(self, states: Sequence[Tensor], path: Tensor) -> None:
        """Keep the states of nodes `path` [B, A] from a tree's `states`, [..., B, N, ..., H] of each layer."""
        for nodes in path.T:
            layers = zip(states, self._axes, strict=True)
            self.steps.append(tuple(states_at(layer, axis, nodes) for layer, axis in layers))


class Session:
    """State of one call: parts that keep their own, and `seen`, the positions verified last with the tokens after them.

    A new session has run the prompt through target and drafter; `first_token` then takes the token after it.
    """

    def __init__(
        self,
        request: Request,  # what was asked for
        noise: NoiseStream | None,  # that tokens are drawn with; None for greedy search
    ) -> None:
        if slots_of(request.stock_cache) != request.cached:
            raise ValueError("Another call has filled this cache since this one was asked for; give each its own copy.")
        self.request, self.noise = request, noise
        config, batch = request.tree_config, len(request.input_ids)
        self.rows = rows = Rows(request)  # the text of each row
        self.stats = DraftStats(trace=Trace(request.input_ids.shape[1]) if request.traced else None)
        from_default = noise is not None and rows.in_step and noise.given is None
        # Context of what the drafter computes, which may draw: where tokens need the default generator, it is put back.
        self.aside: Callable[[], AbstractContextManager[None]]
        self.aside = partial(put_back, rows.device) if from_default else nullcontext
        if noise is not None:
            noise.begin()
        depth = config.resolve_depth(request.drafter.draft_length)
        # Of processes that share a target, only the one whose call was interrupted would have learnt from it.
        records = None if is_shared(request.model) else request.drafter.pace_records
        self.pace = pace = Pace(config, request.device.type, batch, depth, request.timed, records, request.kind)
        observed = (*request.drafter.observers, *request.observers)
        # Whether the drafter may be asked, in this call or a later one; else it is handed nothing to read. Seats and
        # captured rounds, which drop no window either, choose by a pace of their own.
        self.feeds = bool(pace.may_draft(max(rows.rooms)) or request.returns_cache or observed or not request.windowed)
        self.pending: list[Verified] = []  # what the drafter has not read, for want of a draft
        self._memory = request.memory
        asked = request if self.feeds else replace(request, drafter=LookupDrafter())
        drafter = asked.drafter
        with self.stats.phase("prefill"):
            with self.aside():
                state = resume_state(request.stock_cache, drafter, request.input_ids, request.first_slot, request.pads)
                self.drafter_state = state = state or begun(asked, rows)
                state.multimodal |= request.multimodal
                reader, kinds, self.cache = read_prompt(asked, rows, state)
            self._packed = packed_drafts(request.model, drafter) if drafter.draft_length else ()
            # How the drafter is asked for a draft, and the target's forward over a tree: captured passes replace both.
            self.propose_with: Callable[..., Proposal | None] = drafter.propose_ranked
            if self._packed:
                self.propose_with = partial(_propose_packed, drafter, self._packed)
            self.hidden_states: HiddenStates | None = None  # where the call returns them
            collects = request.collects("output_hidden_states")
            if collects:
                self.hidden_states = HiddenStates(reader.outputs.hidden_states, batch, reader.width)
            layers = drafter.feature_layers
            self.verify: Any = Verifier(request.model, self.cache, kinds, layers, collects, reader.shift)
            self._logits = reader.outputs.logits[:, -1:].to(rows.device)  # [B, 1, V] after the prompt
            self.vocab_size = self._logits.shape[-1]
            if noise is not None:
                noise.vocab_size = self.vocab_size
            chances = pace.copied_chances() if request.memory is None else None
            given = request.drafter, config, request.processors, rows.tokens, request.device, rows.eos, pace.cost
            self.grower = TreeGrower(*given, request.memory, chances, self.vocab_size)
            self.walk = Walker(request, rows, noise)
            # The prompt's last position waits for the token after it.
            no_tokens, counts = request.input_ids.new_zeros(batch, 1), torch.ones(batch, dtype=torch.long)
            self.seen = Verified(reader.last, no_tokens, counts)
            self.observers: list[Observer] = [*(one(self) for one in request.drafter.observers), *request.observers]
            if reader.tail is not None:
                for observer in self.observers:
                    observer.verified(reader.tail, None)

    def draw_noise(self, drafted: bool, stats: DraftStats) -> None:
        """Draw the noise of the coming token, and of those that a draft is ranked with; `stats` count its time.

        Stock draws as much for each token. Drawn while a tree grows, it would be measured as a cost of the draft.
        """
        if self.noise is not None and not self.rows.in_step:
            ahead = self.grower.depth if drafted and self.request.tree_config.shared_noise else 0
            with stats.phase("noise"):
                self.noise.draw_to(max(self.rows.emitted) + max(ahead, 1))

    def noise_ahead(self, start: int, depth: int, vocabulary: Tensor | None = None) -> Tensor | None:
        """Gumbel noise [B, depth, V] of tokens from `start` places after the text on; None if trees may not see it.

        [B, depth, M] for the tokens of a draft's `vocabulary` [M].
        """
        if self.noise is None or not self.request.tree_config.shared_noise:
            return None
        return self.noise.gumbel([emitted + start for emitted in self.rows.emitted], depth, vocabulary)

    def score(self, depth: int, logits: Tensor) -> Tensor:
        """Log-scores [B, W, V] of the logits [B, W, V] of `depth`, as the tree will rank them."""
        return self.grower.score(logits, self.noise_ahead(depth, 1))

    def limits(self) -> list[int]:
        """Tokens that each row may emit in the coming round. Noise that no row needs any more is dropped."""
        rows = self.rows
        if rows.finished:
            return rows.rooms
        slowest = rows.slowest()
        if self.noise is not None:
            self.noise.forget_before(slowest)
        # A row that is as far ahead as it may be goes on token by token, or waits if it only runs on.
        return [
            min(room, max(1 - ended, slowest + MAX_LEAD - emitted)) if self.noise is not None or ended else room
            for room, emitted, ended in zip(rows.rooms, rows.emitted, rows.ended, strict=True)
        ]

    def budget(self) -> Budget:
        """Return the limits of the coming round, and whether it is worth a draft."""
        limits = self.limits()
        deepest = [min(limit - 1, room) for limit, room in zip(limits, self.verify.depth_room(), strict=True)]
        ended = self.rows.ended if self.rows.in_step else None
        weights = row_weights(self.rows.emitted, limits)
        drafted, copies = self.pace.choose(self.grower.copies(deepest, ended), weights, deepest)
        return Budget(limits, deepest, weights, copies, drafted)

    def first_token(self) -> None:
        """Take the token after the prompt."""
        root, logits = DraftTree.chain(self.seen.next_tokens), self._logits  # a root alone, which is not read
        del self._logits
        accepted = self.walk(root, logits, self.limits())
        self.seen = self.rows.take(self.seen.features, accepted.path, accepted.counts)
        self.tell(logits, accepted)

    def tell(self, logits: Tensor, accepted: Accepted) -> None:
        """Tell the observers what was `accepted` of a tree with logits [B, N, V]; the time that they take is theirs."""
        for observer in self.observers:
            observer.verified(self.seen, partial(entries_of, logits, accepted.path))

    def tell_end(self, finished: bool) -> None:
        """Tell the observers that the call has ended, whose texts its memory takes in once."""
        memory, self._memory = self._memory, None
        if memory is not None:
            for row, copied in enumerate(self.grower.copied):
                memory.take_in(self.rows.text(row), copied)
        for observer in self.observers:
            observer.ended(finished)

    def unread(self, drafted: bool) -> Verified | None:
        """Return the verified positions that a draft begins with; None if the round is not `drafted`."""
        if self.feeds and (self.request.tree_config.nodes != 1 or self.request.returns_cache):  # else none ever drafts
            self.pending.append(self.seen)
        if not drafted:
            return None
        seen, self.pending = joined(self.pending), []
        return seen

    def propose(self, drafted: bool) -> Proposal | None:
        """Hand the drafter what was verified, and return its draft; None if there is none, or none is asked for."""
        seen = self.unread(drafted)
        if seen is None:
            return None
        with self.aside():
            proposal = self.propose_with(self.drafter_state.state, *seen, self.grower.depth, self.score)
        if proposal is not None:
            self._draft_pads(proposal)
        return proposal

    def refine(self, first: Proposal, tokens: Tensor) -> Proposal:
        """Return the draft after a second look at `tokens` [B, d] of the `first` one."""
        with self.aside(), standing_in(self._packed):
            proposal = self.request.drafter.refine(self.drafter_state.state, first, tokens)
        self._draft_pads(proposal)
        return proposal.within(self.vocab_size)

    def _draft_pads(self, proposal: Proposal) -> None:
        """Draft pads in rows that are only filled up, which would hold up the others."""
        if self.rows.in_step and self.rows.fills_up and True in self.rows.ended:
            proposal.force_token(self.rows.ended, self.rows.pad)

    def grow(self, proposal: Proposal | None, budget: Budget) -> DraftTree:
        """Return the trees [B, N] of the coming round, ranked with the noise that their tokens will be drawn with."""
        ended = self.rows.ended if self.rows.in_step else None
        if proposal is None:
            return self.grower(None, None, budget.deepest, weights=budget.weights, ended=ended, copies=budget.copies)
        refine, drafted = partial(self.refine, proposal), proposal.within(self.vocab_size)
        gumbel = self.noise_ahead(0, self.grower.depth, drafted.vocabulary)
        given = refine, budget.weights, ended, budget.copies, partial(self.stats.phase, "draft")
        return self.grower(drafted, gumbel, budget.deepest, *given)

    def count(self, tree: DraftTree, accepted: Accepted, budget: Budget) -> None:
        """Record the outcome of a round: statistics, whether drafts pay, and what the call collects."""
        if self.hidden_states is not None:
            self.hidden_states.add(self.verify.hidden_states, accepted.path)
        nodes = [len(row) - row.count(-1) for row in tree.parents.tolist()]
        self.stats.count(self.rows.without_pads(accepted.counts), nodes, budget.drafted)
        emitted = [text[len(text) - count :] for text, count in zip(self.rows.tokens, accepted.counts, strict=True)]
        self.pace.count(budget.drafted, emitted, budget.limits, tree.size, tree.max_depth, self.stats.processor_seconds)
        if self.stats.trace is not None:
            self.stats.trace.add(tree, accepted, self.stats.seconds)


def one_round(s: Session) -> None:
    """Emit one token or more in every row that still runs: the target's own, along the path that they take in a tree.

    Should it raise, `break_off` leaves the call as stock would have.
    """
    with s.stats.phase("draft"):
        budget = s.budget()
        s.draw_noise(budget.drafted, s.stats)
        proposal = s.propose(budget.drafted)  # d distributions per row, or None
    with s.stats.phase("grow"):
        tree = s.grow(proposal, budget)  # [B, N] nodes, the root first
    with s.stats.phase("verify"):
        logits, features = s.verify(tree, budget.limits)  # [B, N, V], [B, N, F]: the one forward of the target
    accepted = accept(s, tree, budget, logits, features)
    s.tell(logits, accepted)


def accept(s: Session, tree: DraftTree, budget: Budget, logits: Tensor, features: Tensor) -> Accepted:
    """Emit the target's own tokens on the path that they take in each tree, and keep its nodes."""
    with s.stats.phase("walk"):
        accepted = s.walk(tree, logits, budget.limits)  # the target's own choice at every accepted node
    with s.stats.phase("commit"):
        s.cache.commit(accepted.path, accepted.counts)
        s.seen = s.rows.take(features, accepted.path, accepted.counts)
        s.count(tree, accepted, budget)
    return accepted


def _propose_packed(drafter: Drafter[Any], packed: Sequence[Any], *given: Any) -> Proposal | None:
    with standing_in(packed):
        return drafter.propose_ranked(*given)


def joined(chunks: list[Verified]) -> Verified:
    """One chunk of all, each row's real entries in front, as wide as the longest row."""
    if len(chunks) == 1:
        return chunks[0]
    features = torch.cat([chunk.features.to(chunks[-1].features.device) for chunk in chunks], dim=1)
    tokens = torch.cat([chunk.next_tokens for chunk in chunks], dim=1)
    real = torch.cat([torch.arange(chunk.next_tokens.shape[1]) < chunk.counts[:, None] for chunk in chunks], dim=1)
    counts = real.sum(1)
    order = real.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, : int(counts.max())]
    return Verified(entries_of(features, order), entries_of(tokens, order), counts)


# ---- the end of a call ------------------------------------------------------------------------------------


class DartGenerateOutput(GenerateDecoderOnlyOutput):
    """Stock's output and, in the attribute `draft_stats`, what the drafter did; its fields and keys are stock's."""

    draft_stats: DraftStats | None = None


def result(s: Session) -> Tensor | DartGenerateOutput:
    """Return the output of `generate` once all rows have ended; a cache that outlives the call gets stock's slots."""
    sequences = s.rows.sequences()
    for length in (one for one in s.request.criteria if type(one) is MaxLengthCriteria):
        # It reminds of a text that was longer than the target's positions and not done.
        length(sequences[:, : max(s.rows.max_length - 1, s.rows.prompt_length + 1)], None)
    if s.stats.trace is not None:
        s.stats.trace.end(s.rows.steps)
    if s.noise is not None:
        s.noise.leave_as_stock(s.rows.steps)
    if s.request.returns_cache:
        pending = joined([*s.pending, s.seen, *_even_out(s, sequences)])  # read one by one, each takes a forward
        s.cache.write_back(s.rows.steps - 1)
        request = s.request
        leave(s.cache.stock, request.drafter, s.drafter_state, pending, request.first_slot, sequences.clone())
    if not s.request.generation_config.return_dict_in_generate:
        return sequences
    output = DartGenerateOutput(
        sequences=cast(torch.LongTensor, sequences),
        scores=cast(Any, s.walk.scores),
        logits=cast(Any, s.walk.logits),
        hidden_states=None if s.hidden_states is None else cast(Any, tuple(s.hidden_states.steps)),
        **{CACHE: s.cache.stock},
    )
    output.draft_stats = s.stats
    return output


def _even_out(s: Session, sequences: Tensor) -> Iterator[Verified]:
    """Bring every row to where stock's cache ends, one token short of `sequences` [B, P + T].

    Stock runs the pad tokens after a row's end through the model too; these are the positions that come out.
    """
    prompt = s.cache.prompt_lengths
    wanted = prompt + s.rows.steps - 1
    too_long = s.cache.lengths > wanted
    s.cache.truncate(wanted)  # rows with running states are cut to their prompt, and filled from there
    while int((wanted - s.cache.lengths).max()) > 0:
        counts = (wanted - s.cache.lengths).clamp(max=FILL)
        nodes = torch.arange(int(counts.max()) + 1)
        starts = s.rows.prompt_length + s.cache.lengths - prompt
        columns = (starts[:, None] + nodes).clamp(max=sequences.shape[1] - 1).to(sequences.device)
        tokens = sequences.gather(1, columns)
        _, features = s.verify(DraftTree.chain(tokens[:, :-1], counts.to(tokens.device)), counts.tolist())
        s.cache.commit(nodes[:-1].expand(len(s.rows), -1), counts.tolist())
        yield Verified(features, tokens[:, 1:], counts.masked_fill(too_long, 0))  # those were verified before


def break_off(s: Session) -> None:
    """Leave the generator, and a cache that was passed in as stock would have where the call ends.

    The cache then holds the prompt and so much of the generated tokens as every row has committed.
    """
    if s.noise is not None:
        s.noise.leave_as_stock(s.rows.position)
    if s.request.users_cache:
        committed = int((s.cache.lengths - s.cache.prompt_lengths).min())
        with suppress(RuntimeError):  # out of memory once more: it keeps the prompt alone
            s.cache.write_back(committed)
    s.tell_end(finished=False)
