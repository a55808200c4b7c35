"""One round on fixed shapes, and the state it works on. Read `hf_dart.engine` first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_dart.configuration import MAX_DRAFT_LENGTH, TreeConfig
from hf_dart.engine.attention import packed
from hf_dart.engine.cache import FixedCache, FixedDraft
from hf_dart.engine.topk import largest
from hf_dart.generation.candidates import Ranker
from hf_dart.generation.verify import Verifier
from hf_dart.generation.walk import drawn, follow
from hf_dart.head.drafting import DraftingModel
from hf_dart.proposal import Proposal
from hf_dart.trees.scoring import BeamScores, PathScores
from hf_dart.trees.tree import DraftTree, Transitions, grow_tree

Part = TypeVar("Part")

RING = 4
"""Rounds whose tokens are kept for the host."""


@dataclass(frozen=True)
class Shape:
    """All that the tensors of a round depend on, beside the models.

    Attributes:
        batch: B.
        slots: T, the tier.
        tree: how trees grow; its `nodes` is a number.
        vocab_size: V of the target's logits.
        depth: d, the deepest node; 0 where nothing is drafted.
        processors: names and numbers of the logits processors, which are part of the round.
        sampled: are tokens drawn?
    """

    batch: int
    slots: int
    tree: TreeConfig
    vocab_size: int
    depth: int
    processors: tuple[Any, ...] = ()
    sampled: bool = False

    @property
    def bucket(self) -> int:
        """N: the nodes of a tree, filled up to what attention kernels like."""
        nodes = self.tree.nodes or 1
        return nodes if nodes == 1 else -(-nodes // 8) * 8

    @property
    def path(self) -> int:
        """A: the most nodes that a round accepts, the root included."""
        return min(self.depth + 1, self.tree.nodes or 1)

    @property
    def noise_rows(self) -> int:
        """Positions whose noise is held: those of the rounds that may be under way, and of a tree behind them."""
        return RING * self.path + self.depth + 1 if self.sampled else 0

    @property
    def draft_slots(self) -> int:
        """Slots of the head's cache: those of the text, a round's new entries and its mask slots."""
        return -(-(self.slots + self.path + MAX_DRAFT_LENGTH) // 8) * 8


def most_nodes(depth: int, config: TreeConfig, vocab_size: int) -> int:
    """How many nodes, the root included, `grow_tree` finds at most for so many drafts."""
    if depth == 0:
        return 1
    width = min(config.top_k, vocab_size)
    nodes, paths = 1 + width, width
    for _ in range(depth - 1):
        paths = width * min(config.beam, paths)
        nodes += paths
    return nodes


@dataclass
class State:
    """What a round finds and leaves, all on the device.

    Attributes:
        roots: [B] the last committed tokens.
        emitted, limits: [B] tokens generated so far, and how many may be.
        ended: [B] rows that stand still.
        ends: [V] which tokens end a row.
        features, next_tokens, counts: [B, A, F], [B, A], [B]: what the last round accepted, for the head.
        ring: [RING, B, A + 1] the tokens of the last rounds, and in the last column how many they are.
        turn: [] the number of the coming round.
        noise: [M, B, V] Exp(1) noise of output position p in row p % M, where tokens are drawn.
    """

    roots: Tensor
    emitted: Tensor
    limits: Tensor
    ended: Tensor
    ends: Tensor
    features: Tensor
    next_tokens: Tensor
    counts: Tensor
    ring: Tensor
    turn: Tensor
    noise: Tensor

    @classmethod
    def empty(cls, shape: Shape, features: Tensor) -> State:
        """Of rows that have all ended, with features like `features` [..., F]."""
        device, batch, path = features.device, shape.batch, shape.path

        def zeros(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            roots=zeros(batch),
            emitted=zeros(batch),
            limits=zeros(batch),
            ended=~zeros(batch, dtype=torch.bool),
            ends=zeros(shape.vocab_size, dtype=torch.bool),
            features=zeros(batch, path, features.shape[-1], dtype=features.dtype),
            next_tokens=zeros(batch, path),
            counts=zeros(batch),
            ring=zeros(RING, batch, path + 1),
            turn=zeros(),
            noise=zeros(shape.noise_rows, batch, shape.vocab_size, dtype=torch.float32) + 1,
        )


class FixedRound:
    """A round of one shape: `guess`, `check`, `keep`.

    Args:
        head: what drafts.
        verifier: of the target, over `cache`.
        cache, draft, state: what the round works on; `draft` is the head's.
        processors: that the target's scores go through; functions of these alone.
        backend: of `torch.compile` for `guess` and `check`, which are compiled apart: `keep` moves the entries of all
            layers at once, in one storage that the other two see as a tensor per layer. None runs them as they are.
    """

    def __init__(
        self,
        shape: Shape,
        head: DraftingModel,
        verifier: Verifier,
        cache: FixedCache,
        draft: FixedDraft,
        state: State,
        processors: LogitsProcessorList,
        backend: str | None = None,
    ) -> None:
        self.shape, self.head, self.verifier = shape, head, verifier
        self.cache, self.draft, self.state = cache, draft, state
        self.processors, self._rank = processors, Ranker(processors, shape.tree.top_k)
        self._scores = PathScores(shape.tree, None)
        self._backend = backend
        self._guess, self._check = self.compiled(self.guess), self.compiled(self.check)

    def compiled(self, part: Callable[..., Part]) -> Callable[..., Part]:
        """A part of the round, compiled if parts are."""
        if self._backend is None:
            return part
        # Dynamo counts compilations per code object: with one for all rounds, they would soon be too many.
        plain = getattr(part, "__func__", part)
        own = FunctionType(
            plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
        )
        part = own if plain is part else MethodType(own, part.__self__)  # type: ignore[attr-defined]
        return torch.compile(part, fullgraph=True, backend=self._backend, dynamic=False)

    def __call__(self) -> None:
        """One round; nothing is returned and nothing read back."""
        # Also in inference mode: what runs is what was compiled.
        with torch.inference_mode(False), torch.no_grad(), packed(self.verifier.target):
            self.keep(*self._check(self._guess()))

    def guess(self) -> DraftTree:
        """The trees [B, N]: what the head drafts behind the roots, none deeper than its row may still emit."""
        state, shape = self.state, self.shape
        if shape.bucket == 1:
            return DraftTree.chain(state.roots[:, None])
        proposal = self.head.propose(self.draft, state.features, state.next_tokens, state.counts, shape.depth)
        proposal = proposal.within(shape.vocab_size)
        candidates, scores = self._candidates(proposal)
        table = None
        if shape.tree.selector:
            table = self.head.transitions(proposal, state.roots, candidates, scores)
        scorer = None
        if table is not None or not self._scores.plain:
            scorer = BeamScores(self._scores, shape.depth, None if table is None else Transitions(table), None)
        # A path of k drafts emits k + 1 tokens.
        left = state.limits - state.emitted - 1
        deepest = left.minimum(self.verifier.room(self.cache.lengths)).masked_fill(state.ended, 0)
        tree = grow_tree(
            state.roots[:, None],
            candidates,
            scores,
            nodes=shape.tree.nodes or 1,
            beam=shape.tree.beam,
            depth_limit=deepest,
            scorer=scorer,
        )
        return tree.padded(shape.bucket)

    def _candidates(self, proposal: Proposal) -> tuple[Tensor, Tensor]:
        """Token ids and log-probabilities [B, d, K], best first."""
        state, shape = self.state, self.shape
        if shape.sampled:
            gumbel = None
            if shape.tree.shared_noise:
                steps = torch.arange(shape.depth, device=state.emitted.device)
                gumbel = -self._noise(state.emitted[:, None] + steps).log()
            return self._rank(proposal.logits, gumbel, None, proposal.vocabulary)
        logits = proposal.logits.float()
        best, columns = largest(logits, min(shape.tree.top_k, logits.shape[-1]))
        tokens = columns if proposal.vocabulary is None else proposal.vocabulary[columns]
        return tokens, best - logits.logsumexp(-1, keepdim=True)

    def check(self, tree: DraftTree) -> tuple[Tensor, ...]:
        """The target's verdict.

        Returns:
            path [B, A] nodes from the root on, tokens [B, A] the target's own behind each, counts [B] how many of
            them are emitted, ended [B] the rows that end with them or had before, features [B, N, F] of all nodes.
        """
        state, shape = self.state, self.shape
        logits, features = self.verify(tree)
        path, tokens, reached = follow(tree, self._choose(tree, logits))
        path, tokens = path[:, : shape.path], tokens[:, : shape.path]
        steps = torch.arange(shape.path, device=path.device)
        # A text ends with its first end token; what the tree holds behind it was accepted for nothing.
        is_end = state.ends[tokens] & (steps < reached[:, None])
        to_end = torch.where(is_end, steps + 1, shape.path + 1).amin(-1)
        left = state.limits - state.emitted
        counts = reached.minimum(to_end).minimum(left).masked_fill(state.ended, 0)
        return path, tokens, counts, state.ended | (to_end <= counts) | (left <= counts), features

    def _choose(self, tree: DraftTree, logits: Tensor) -> Tensor:
        """The target's token behind every node, [B, N]; -1 where there is none to draw."""
        if not self.shape.sampled and not self.processors:
            # Stock compares logits as float32, which narrower ones are in the same order.
            return (logits.float() if logits.dtype == torch.float64 else logits).argmax(-1)
        scores = logits.float().flatten(0, 1)
        for processor in self.processors:
            scores = processor(None, scores)  # type: ignore[arg-type]
        scores = scores.view_as(logits)
        if not self.shape.sampled:
            return scores.argmax(-1)
        return drawn(scores.softmax(-1) / self._noise(self.state.emitted[:, None] + tree.depths))

    def _noise(self, positions: Tensor) -> Tensor:
        """E [B, n, V] of output positions [B, n]."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        return self.state.noise[positions % self.shape.noise_rows, rows]

    def verify(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """The target's logits [B, N, V] and features [B, N, F]."""
        # The root of a row that has ended may lie behind the end of the position table.
        return self.verifier.run(tree, (self.cache.lengths - self.state.ended.long()).clamp(min=0))

    def keep(self, path: Tensor, tokens: Tensor, counts: Tensor, ended: Tensor, features: Tensor) -> None:
        """Commit what `check` returned, and put the tokens where the host will find them."""
        state = self.state
        self.cache.commit(path)
        self.cache.lengths.add_(counts)
        known = tokens.clamp(min=0)  # the host says that there is none, and the round behind must not trip over it
        last = known.gather(1, (counts - 1).clamp(min=0)[:, None])
        state.roots.copy_(torch.where(counts > 0, last[:, 0], state.roots))
        state.emitted.add_(counts)
        state.ended.copy_(ended)
        state.features.copy_(features.gather(1, path[..., None].expand(-1, -1, features.shape[-1])))
        # Behind a row's last token the head is shown that one again: anything that is a token will do.
        steps = torch.arange(path.shape[1], device=path.device)
        state.next_tokens.copy_(torch.where(steps < counts[:, None], known, state.roots[:, None]))
        state.counts.copy_(counts)
        state.ring.index_copy_(0, (state.turn % RING)[None], torch.cat([tokens, counts[:, None]], dim=1)[None])
        state.turn.add_(1)
