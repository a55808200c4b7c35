"""The forwards of target and head on fixed shapes, for calls whose rounds ask the host: all else is eager.

What a call asks of the host (processors that may do anything, trees that follow copied text, n-gram tables or a
calibration, drafters of every kind) runs as in the eager round. Of a round that is bound by launches the target's
forward is by far the most, and the head's pass the next; they are what is lent to a call here (`Forward.lent_to`), in
place of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_dart.cache.ragged import RaggedCache
from hf_dart.decoding.proposer import Proposal, Score
from hf_dart.engine.attention import PackedVerifier, packed
from hf_dart.engine.cache import FixedCache
from hf_dart.engine.compiling import compiled
from hf_dart.engine.draft import Drafting
from hf_dart.engine.graphs import Launch, Means
from hf_dart.engine.proof import difference
from hf_dart.trees.tree import DraftTree

if TYPE_CHECKING:
    from hf_dart.decoding.session import Call


class Forward:
    """Verification of trees of up to N nodes behind texts of up to T tokens, in place of a call's own.

    Args:
        call: a prefilled call; others like it may come.
        slots, nodes: T and N.
        made_with: how.
    """

    def __init__(self, call: Call, slots: int, nodes: int, made_with: Means) -> None:
        assert isinstance(call.cache, RaggedCache)
        self.nodes, self._made_with = nodes, made_with
        self._kinds = call.verify.kinds
        with torch.inference_mode(False), torch.no_grad():
            self._whole = FixedCache(call.cache, len(call.rows), slots, nodes, call.model.device, made_with.memory)
        self._sizes: dict[int, _Sized] = {}
        self.drafting = Drafting(call, slots, nodes, made_with) if Drafting.possible(call) else None

    def fits(self, longest: int) -> bool:
        """Is there room for one more round behind `longest` committed tokens?"""
        return longest + self.nodes <= self._whole.slots

    def load(self, call: Call) -> None:
        """Take over what a call has committed."""
        cache = call.cache
        assert isinstance(cache, RaggedCache)
        self._whole.store.copy_from(cache.store, cache.longest)
        self._whole.store.clear_from(cache.longest)  # what another call left might be NaN
        self._whole.lengths.copy_(cache.lengths)
        if self.drafting is not None:
            self.drafting.load(call)

    def differs(self, call: Call) -> tuple[float, float]:
        """As `Tier.differs`."""

        def verify(tree: DraftTree, running: Tensor) -> tuple[Tensor, Tensor]:
            assert isinstance(call.cache, RaggedCache)
            logits, _ = self.sized(call, call.cache, tree.size)(tree, self._whole.lengths - (~running).long())
            return logits, torch.ones_like(tree.tokens, dtype=torch.bool)

        return difference(call, list(range(len(call.rows))), self.nodes, verify)

    @contextmanager
    def lent_to(self, call: Call) -> Iterator[Lent]:
        """Let the rounds of a call verify here, and let it go on by itself behind that."""
        lent = Lent(self, call)
        try:
            yield lent
        finally:
            lent.hand_back()

    def sized(self, call: Call, like: RaggedCache, nodes: int) -> _Sized:
        """The forward for trees of `nodes`, filled up to a power of two; made when it is first needed.

        Args:
            call: being decoded.
            like: its own cache.

        Raises:
            ValueError: there is no room for so many.
        """
        if nodes > self.nodes:
            raise ValueError(f"A tree of {nodes} nodes, where there is room for {self.nodes}.")
        size = nodes if nodes == 1 else min(max(8, 1 << (nodes - 1).bit_length()), self.nodes)
        if size not in self._sizes:
            with torch.inference_mode(False), torch.no_grad():
                cache = self._whole.for_nodes(like, size)
                layers, hands_down = call.drafter.feature_layers, self._made_with.hands_down
                verifier = PackedVerifier(call.model, cache, self._kinds, layers, hands_down=hands_down)
                self._sizes[size] = _Sized(verifier, cache, size, self._made_with)
        return self._sizes[size]

    def hand_to(self, cache: RaggedCache, lengths: Tensor) -> None:
        """Let a call's own cache take over what has been committed, `lengths` [B]."""
        cache.take_in(self._whole.store, lengths)


class _Sized:
    """The forward over trees of N nodes, launched on buffers that are filled in before."""

    def __init__(self, verifier: PackedVerifier, cache: FixedCache, nodes: int, made_with: Means) -> None:
        self.cache, self._target, device = cache, verifier.target, cache.lengths.device
        batch = len(cache.lengths)
        none = torch.zeros(batch, nodes, dtype=torch.long, device=device)
        alone = torch.eye(nodes, dtype=torch.bool, device=device).repeat(batch, 1, 1)
        self._tree = DraftTree(none, none - 1, none.clone(), alone, max_depth=nodes - 1)
        self._roots = torch.zeros_like(cache.lengths)
        self._run = compiled(verifier.run, made_with.backend)
        self._launch = Launch(partial(self._step, self._run), device, made_with.pool, partial(self._step, verifier.run))

    def _step(self, run: Callable[[DraftTree, Tensor], tuple[Tensor, Tensor]]) -> None:
        with torch.inference_mode(False), torch.no_grad(), packed(self._target):
            self._found = run(self._tree, self._roots)

    def __call__(self, tree: DraftTree, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, N, V] and features [B, N, F] of a tree whose roots stand at `roots` [B].

        On a GPU the next launch writes its own in the same place; a root's features may be kept (`Call.pending`).
        """
        wide = tree.padded(self._tree.size)
        for mine, given in (
            (self._tree.tokens, wide.tokens),
            (self._tree.parents, wide.parents),
            (self._tree.depths, wide.depths),
            (self._tree.ancestors, wide.ancestors),
            (self._roots, roots),
        ):
            mine.copy_(given)
        self._launch()
        logits, features = self._found
        return logits[:, : tree.size], features.clone() if tree.size == 1 else features[:, : tree.size]


class Lent:
    """What stands in a call in place of its `verify`, `cache` and `ask`, as far as rounds ask for them.

    Attributes:
        failure: why the forward could not be launched, if it could not; the call then has its own back.
        lengths, prompt_lengths: as `cache.base.TreeCache` has them.
    """

    hidden_states: tuple[Tensor, ...] = ()

    def __init__(self, forward: Forward, call: Call) -> None:
        assert isinstance(call.cache, RaggedCache)
        self._forward, self._call = forward, call
        self._cache, self._verify = call.cache, call.verify
        self._sized: _Sized | None = None
        self.failure: Exception | None = None
        self.lengths, self.prompt_lengths = call.cache.lengths, call.cache.prompt_lengths
        call.cache = call.verify = self  # type: ignore[assignment]
        self._cache.let_go()
        self._draft, self._ask = call.draft.state, call.ask
        self._drafting = forward.drafting
        if self._drafting is not None:
            call.draft.state, call.ask = self._drafting.state, self.ask

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    def depth_room(self) -> list[int]:
        """As `Verifier.depth_room`."""
        return self._verify.room(self.lengths).tolist()

    def __call__(self, tree: DraftTree, limits: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """As `Verifier.__call__`; the call's own if this one fails."""
        running = torch.tensor([limit != 0 for limit in limits or [1] * len(self.lengths)])
        roots = (self.lengths - (~running).long()).to(tree.tokens.device)
        try:
            self._sized = self._forward.sized(self._call, self._cache, tree.size)
            return self._sized(tree, roots)
        except Exception as failure:
            self.failure = failure
            self.hand_back()
            return self._call.verify(tree, limits)

    def ask(
        self, state: Any, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None, score: Score
    ) -> Proposal | None:
        """As `Drafter.propose_ranked`; the call's own behind more positions than fit here, or if this fails."""
        assert self._drafting is not None
        if next_tokens.shape[1] <= self._drafting.most:
            try:
                return self._drafting(features, next_tokens, counts, depth or self._call.drafter.draft_length)
            except Exception as failure:
                self.failure = failure
        self._hand_back_draft()
        return self._call.ask(self._call.draft.state, features, next_tokens, counts, depth, score)

    def _hand_back_draft(self) -> None:
        if self._drafting is not None:
            self._call.draft.state, self._call.ask = self._draft, self._ask
            self._draft.take_in(self._drafting.state, list(range(len(self.lengths))))
            self._drafting = None

    def commit(self, path: Tensor, counts: list[int]) -> None:
        """As `TreeCache.commit`."""
        assert self._sized is not None
        cache = self._sized.cache
        cache.commit(path.to(cache.lengths.device))
        self.lengths = self.lengths + torch.tensor(counts)
        cache.lengths.copy_(self.lengths)

    def hand_back(self) -> None:
        """Let the call go on with its own, which take over what was committed here."""
        if self._call.verify is self:  # type: ignore[comparison-overlap]
            self._call.cache, self._call.verify = self._cache, self._verify
            if self._call.returns_cache or not self._call.rows.finished:
                self._forward.hand_to(self._cache, self.lengths)
            self._hand_back_draft()
