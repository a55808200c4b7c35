"""The forwards of target and head on fixed shapes, for calls whose rounds ask the host: all else is eager.

What a call asks of the host (processors that may do anything, edit passes, drafters of every kind) runs as in the
eager round. Of a round that is bound by launches the target's forward is by far the most, and the head's pass the next:
those two stand in for a session's own here (`Forward.stand_in`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_dart.cache.hybrid import HybridCache
from hf_dart.cache.ragged import RaggedCache
from hf_dart.drafters.proposal import Proposal, Score
from hf_dart.engine.attention import PackedVerifier
from hf_dart.engine.cache import FixedCache
from hf_dart.engine.compiling import compiled
from hf_dart.engine.draft_pass import CapturedDraftPass
from hf_dart.engine.graphs import Capture, Launch
from hf_dart.engine.job import Job
from hf_dart.engine.trial import difference
from hf_dart.trees.tree import DraftTree


class Forward:
    """Verification of trees of up to N nodes after texts of up to T tokens, in place of a call's own.

    Attributes:
        sizes: what was captured, by nodes of the trees.

    Args:
        job: of a call; others like it may come.
        slots, nodes: T and N.
        capture: how.
    """

    def __init__(self, job: Job, slots: int, nodes: int, capture: Capture) -> None:
        self.nodes, self._capture = nodes, capture
        with torch.inference_mode(False), torch.no_grad():
            self._whole = FixedCache(job.cache, len(job.rows), slots, nodes, job.model.device, capture.memory)
        self.sizes: dict[int, SizedForward] = {}
        self.draft_pass: CapturedDraftPass | None = None
        if job.head is not None and job.config.nodes != 1:
            self.draft_pass = CapturedDraftPass(job, job.head, slots, nodes, capture)

    def fits(self, longest: int) -> bool:
        """Is there room for one more round after `longest` committed tokens?"""
        return longest + self.nodes <= self._whole.slots

    def load(self, job: Job) -> None:
        """Take over what a call has committed."""
        cache = job.cache
        self._whole.store.copy_from(cache.store, cache.longest)
        self._whole.store.clear_from(cache.longest)  # what another call left might be NaN
        self._whole.lengths.copy_(cache.lengths)
        self._whole.load_states(cache, range(len(job.rows)))
        for sized in self.sizes.values():
            sized.verifier.load(job.verify, range(len(job.rows)))
        if self.draft_pass is not None:
            self.draft_pass.load(job)

    def differs(self, job: Job) -> tuple[float, float]:
        """The largest difference of a logit from the eager forward's on trees of random tokens, and what is allowed."""

        def verify(tree: DraftTree, running: Tensor) -> tuple[Tensor, Tensor]:
            logits, _ = self.sized(job, tree.size)(tree, self._whole.lengths - (~running).long())
            return logits, torch.ones_like(tree.tokens, dtype=torch.bool)

        return difference(job, list(range(len(job.rows))), self.nodes, verify)[:2]

    @contextmanager
    def stand_in(self, job: Job) -> Iterator[CapturedParts]:
        """Let rounds verify here, with a session of their own, and let the job's go on where they end."""
        stand_in = CapturedParts(self, job)
        try:
            yield stand_in
        finally:
            stand_in.hand_back()

    def sized(self, job: Job, nodes: int) -> SizedForward:
        """The forward for trees of `nodes`, filled up to a power of two; made when it is first needed.

        Args:
            job: being decoded.

        Raises:
            ValueError: there is no room for so many.
        """
        if nodes > self.nodes:
            raise ValueError(f"A tree of {nodes} nodes, where there is room for {self.nodes}.")
        size = nodes if nodes == 1 else min(max(8, 1 << (nodes - 1).bit_length()), self.nodes)
        if size not in self.sizes:
            with torch.inference_mode(False), torch.no_grad():
                cache = self._whole.for_nodes(job.cache, size)
                verifier = PackedVerifier(job.verify, cache, self._capture.hands_down)
                verifier.load(job.verify, range(len(job.rows)))
                self.sizes[size] = SizedForward(verifier, cache, size, self._capture)
        return self.sizes[size]

    def hand_to(self, cache: RaggedCache | HybridCache, lengths: Tensor, whole: bool) -> None:
        """See `FixedCache.hand_to`."""
        self._whole.hand_to(cache, lengths, list(range(len(lengths))), whole)


class SizedForward:
    """The forward over trees of N nodes, launched on buffers that are filled in before."""

    def __init__(self, verifier: PackedVerifier, cache: FixedCache, nodes: int, capture: Capture) -> None:
        self.cache, self.verifier, device = cache, verifier, cache.lengths.device
        batch = len(cache.lengths)
        none = torch.zeros(batch, nodes, dtype=torch.long, device=device)
        alone = torch.eye(nodes, dtype=torch.bool, device=device).repeat(batch, 1, 1)
        self._tree = DraftTree(none, none - 1, none.clone(), alone, max_depth=nodes - 1)
        self._roots = torch.zeros_like(cache.lengths)
        self._run = compiled(verifier.run, capture.backend)
        self.launch = Launch(partial(self.step, self._run), device, capture.pool, partial(self.step, verifier.run))

    def step(self, run: Callable[[DraftTree, Tensor], tuple[Tensor, Tensor]]) -> None:
        """What a launch does, by `run`: the forward over the buffers."""
        with torch.inference_mode(False), torch.no_grad(), self.verifier.packed():
            self._found = run(self._tree, self._roots)

    def __call__(self, tree: DraftTree, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, N, V] and features [B, N, F] of a tree whose roots stand at `roots` [B].

        On a GPU the next launch writes its own in the same place; a root's features may wait in `DrafterRunner`.
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
        self.launch()
        logits, features = self._found
        return logits[:, : tree.size], features.clone() if tree.size == 1 else features[:, : tree.size]


class CapturedParts:
    """A session's `verify` and `cache`, and its drafter's pass, as long as rounds run here in their place.

    Attributes:
        session: the job's, with this in the place of those; it shares all else with it.
        failure: why the forward could not be launched, if it could not; what is asked of this is the session's own
            then.
        lengths: [B] committed entries per row, on the CPU.
    """

    hidden_states: tuple[Tensor, ...] = ()

    def __init__(self, forward: Forward, job: Job) -> None:
        self._forward, self._job = forward, job
        self._sized: SizedForward | None = None
        self._holds, self._drafts, self._whole = True, forward.draft_pass is not None, True
        self.failure: Exception | None = None
        self.lengths = job.cache.lengths
        job.cache.release()
        runner = job.session.drafter_runner
        if forward.draft_pass is not None:
            state = replace(runner.drafter_state, state=forward.draft_pass.state)
            runner = replace(runner, drafter_state=state, propose_with=self.propose)
        self.session = replace(job.session, verify=self, cache=self, drafter_runner=runner)

    @property
    def longest(self) -> int:
        """Committed entries of the longest row."""
        return int(self.lengths.max())

    def depth_room(self) -> list[int]:
        """How many positions after each row's root the target's position table still holds."""
        return self._job.verify.room(self.lengths).tolist()

    def __call__(self, tree: DraftTree, limits: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Logits [B, N, V] and features [B, N, F] of a tree; by the session's own forward if this one fails."""
        if self._holds:
            running = torch.tensor([limit != 0 for limit in limits or [1] * len(self.lengths)])
            roots = (self.lengths - (~running).long()).to(tree.tokens.device)
            try:
                self._sized = self._forward.sized(self._job, tree.size)
                return self._sized(tree, roots)
            except Exception as failure:
                self.failure = failure
                self._hand_back_cache()
        return self._job.verify(tree, limits)

    def propose(
        self, state: Any, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None, score: Score
    ) -> Proposal | None:
        """A draft, by the head itself after more positions than fit here, or if this fails."""
        draft_pass = self._forward.draft_pass
        if self._drafts and draft_pass is not None and next_tokens.shape[1] <= draft_pass.most:
            try:
                return draft_pass(features, next_tokens, counts, depth or self._job.drafter.draft_length)
            except Exception as failure:
                self.failure = failure
        self._hand_back_draft()
        return self._job.drafter.propose_ranked(self._job.draft_state, features, next_tokens, counts, depth, score)

    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Keep `counts[b]` entries of row b, those of nodes `path[b]` [B, A], and drop the other nodes."""
        if not self._holds or self._sized is None:
            self._job.cache.commit(path, counts)
            self.lengths = self._job.cache.lengths
            return
        cache = self._sized.cache
        path = path.to(cache.lengths.device)
        self._whole = False
        cache.commit(path)
        if cache.states is not None:
            cache.states.commit(path, counts)
        self.lengths = self.lengths + torch.tensor(counts)
        cache.lengths.copy_(self.lengths)
        self._whole = True

    def hand_back(self) -> None:
        """Bring the job's session to where this one stands."""
        self._hand_back_cache()
        self._hand_back_draft()
        own, other = self._job.session, self.session
        own.seen = other.seen
        own.drafter_runner.pending = other.drafter_runner.pending

    def _hand_back_cache(self) -> None:
        if self._holds:
            self._holds = False
            if self._job.returns_cache or not self._job.rows.finished:
                self._forward.hand_to(self._job.cache, self.lengths, self._whole)

    def _hand_back_draft(self) -> None:
        if self._drafts and self._forward.draft_pass is not None:
            self._drafts = False
            self._job.draft_state.take_in(self._forward.draft_pass.state, list(range(len(self.lengths))))
            # Later passes, and second looks at their drafts, go on with the head's own.
            self.session.drafter_runner.drafter_state = self._job.session.drafter_runner.drafter_state
