"""What one call of `generate` needs from its first round to its last: complete when it is made, by `prefill`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from hf_dart.cache.target_cache import TargetCache
from hf_dart.decoding.drafter_runner import DrafterRunner
from hf_dart.decoding.grow import TreeGrower
from hf_dart.decoding.noise import MAX_LEAD, NoiseStream
from hf_dart.decoding.pace import CHAIN, Pace, row_weights
from hf_dart.decoding.request import Request
from hf_dart.decoding.rows import Rows, Streaming
from hf_dart.decoding.stats import DraftStats
from hf_dart.decoding.walk import Accepted, Walker
from hf_dart.drafters.proposal import Proposal, Verified
from hf_dart.models.features import Streams, row_axis, states_at
from hf_dart.trees.copies import Copy
from hf_dart.trees.tree import DraftTree

Noise = Callable[[int, int], "Tensor | None"]
"""Of a start and a depth: the Gumbel noise [B, depth, V] of tokens that many places after the text, if trees see it."""


@dataclass(frozen=True)
class Budget:
    """What the coming round may do.

    Attributes:
        limits: tokens that each row may emit; 0 if it has ended or is too far ahead.
        deepest: deepest node of each row's tree: a path of k drafts emits k + 1 tokens.
        weights: of the rows' tokens (`pace.row_weights`).
        copies: what may be copied in each row.
        level: how the round is drafted, one of `pace.MODES`.
    """

    limits: list[int]
    deepest: list[int]
    weights: list[float]
    copies: list[Copy]
    level: str


class HiddenStates:
    """The hidden states that `output_hidden_states` asks for: of the prefill, then of one committed token at a time."""

    def __init__(self, of_prefill: tuple[Tensor, ...], rows: int, positions: int, streams: Streams) -> None:
        self.steps = [of_prefill]
        self._axes = [row_axis(layer, rows, positions, streams) for layer in of_prefill]

    def add(self, states: Sequence[Tensor], path: Tensor) -> None:
        """Keep those of the nodes `path` [B, A] from `states` of a tree, [..., B, N, ..., H] of each layer."""
        for nodes in path.T:
            layers = zip(states, self._axes, strict=True)
            self.steps.append(tuple(states_at(layer, axis, nodes) for layer, axis in layers))


@dataclass
class Session:
    """The parts of one call. `seen` moves on with every round; the others stay, and keep their own state.

    Attributes:
        request: what was asked for.
        rows: the text of each row.
        streaming: who sees it.
        stats: what was done.
        pace: how rounds are drafted, and what they cost.
        drafter_runner: the drafter's side.
        grower: from a draft to a tree.
        verify: the target's forward over a tree: a `Verifier`, or a captured one in its place.
        cache: what stays of it, round by round.
        own_cache: the call's own cache, where all of that lies when the rounds are over.
        walk: the target's own choice at every node.
        noise: that tokens are drawn with; None for greedy search.
        noise_ahead: the same, as far as trees may see it.
        stock_cache: stock's, filled by the prefill.
        vocab_size: V of the target's logits.
        hidden_states: where the call returns them.
        seen: the positions that the last round verified, each with the token after it.
    """

    request: Request
    rows: Rows
    streaming: Streaming
    stats: DraftStats
    pace: Pace
    drafter_runner: DrafterRunner
    grower: TreeGrower
    verify: Any
    cache: TargetCache
    own_cache: TargetCache
    walk: Walker
    noise: NoiseStream | None
    noise_ahead: Noise
    stock_cache: Cache
    vocab_size: int
    hidden_states: HiddenStates | None
    seen: Verified

    def limits(self) -> list[int]:
        """Tokens that each row may emit in the coming round. Noise that no row needs any more is dropped."""
        rows = self.rows
        limits = rows.rooms
        if self.noise is not None and not rows.finished:
            slowest = rows.slowest()
            self.noise.forget_before(slowest)
            ahead = zip(limits, rows.emitted, strict=True)
            # A row that is as far ahead as it may be, or came farther in captured rounds, goes on token by token.
            limits = [min(room, max(1, slowest + MAX_LEAD - emitted)) for room, emitted in ahead]
        return limits

    def budget(self) -> Budget:
        """What the coming round may do, and whether it is worth a draft."""
        limits = self.limits()
        deepest = [min(limit - 1, room) for limit, room in zip(limits, self.verify.depth_room(), strict=True)]
        weights, copies = row_weights(self.rows.emitted, limits), self.grower.copies(deepest)
        return Budget(limits, deepest, weights, copies, self.pace.choose(copies, weights, deepest))

    def first_token(self, logits: Tensor) -> None:
        """Take the token after the prompt from the target's logits [B, 1, V] of its last position."""
        root = DraftTree.chain(self.seen.next_tokens)  # a root that nobody looks at
        accepted = self.walk(root, logits, self.limits())
        self.seen = self.rows.take(self.seen.features, accepted.path, accepted.counts)

    def grow(self, proposal: Proposal | None, budget: Budget) -> DraftTree:
        """The trees [B, N] of the coming round, ranked with the noise that their tokens will be drawn with."""
        ended = self.rows.ended if self.rows.in_step else None
        if proposal is None:
            return self.grower(None, None, budget.deepest, weights=budget.weights, ended=ended, copies=budget.copies)
        gumbel = self.noise_ahead(0, self.grower.depth)
        chain = budget.level == CHAIN

        def refine(tokens: Tensor) -> Proposal:
            return self.drafter_runner.refine(proposal, tokens).within(self.vocab_size)

        drafted = proposal.within(self.vocab_size)
        return self.grower(drafted, gumbel, budget.deepest, refine, chain, budget.weights, ended, budget.copies)

    def count(self, tree: DraftTree, accepted: Accepted, budget: Budget) -> None:
        """Note what came of a round: statistics, whether drafts pay, and what the call collects."""
        if self.hidden_states is not None:
            self.hidden_states.add(self.verify.hidden_states, accepted.path)
        self.stats.count(accepted.counts, budget.limits, tree.size, budget.level)
        came = [text[len(text) - count :] for text, count in zip(self.rows.tokens, accepted.counts, strict=True)]
        self.pace.count(budget.level, came, budget.limits, tree.size, tree.max_depth, self.stats.seconds)
        if self.stats.trace is not None:
            self.stats.trace.add(tree, accepted, self.stats.seconds)
