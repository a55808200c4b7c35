"""`Tier`: caches on fixed shapes for texts up to T tokens, and the parts of a round that were captured over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.decoding.session import Session
from hf_dart.drafters.base import Drafter, Proposal, Score, Verified
from hf_dart.engine.graphs import Capture
from hf_dart.models.tolerance import difference, same
from hf_dart.models.trial import TRIAL_TREE
from hf_dart.models.verify import Verifier
from hf_dart.trees.tree import MAX_DRAFT_LENGTH, DraftTree

_DEPTH = 3  # depth of the trial's tree
_WIDE = 8  # least nodes of a forward; on a CPU, of all rows together, where more of them cost time
_TRIES = 3  # trees that may differ before a target is refused: rounding may send a token to another expert

Run = Callable[..., "tuple[Tensor, Tensor]"]


class CapturedForward:
    """The target's forward over trees of N nodes, launched on buffers that are filled in before.

    The verifier's cache is on fixed shapes.
    """

    def __init__(self, verifier: Verifier, batch: int, nodes: int, capture: Capture) -> None:
        self.verifier, self.nodes = verifier, nodes
        device = verifier.cache.lengths.device
        with torch.inference_mode(False), torch.no_grad():
            none = torch.zeros(batch, nodes, dtype=torch.long, device=device)
            alone = torch.eye(nodes, dtype=torch.bool, device=device).repeat(batch, 1, 1)
            self._tree = DraftTree(none, none - 1, none.clone(), alone, max_depth=nodes - 1)
            self._roots = torch.zeros(batch, dtype=torch.long, device=device)
            verifier.cache.prepare(nodes)
        self.launch = capture.launched(self.step, verifier.forward)

    def step(self, run: Run) -> None:
        """Run the forward over the buffers by `run`, as a launch does."""
        with torch.inference_mode(False), torch.no_grad(), self.verifier.takes_trees():
            self._found = run(self._tree, self._roots)

    def __call__(self, tree: DraftTree, limits: list[int] | None) -> tuple[Tensor, Tensor]:
        """Compute logits [B, N, V] and features [B, N, F] of a tree of at most N nodes; see `Verifier`.

        On a GPU the next launch writes its own in the same place; a root's features may wait in `Session`.
        """
        self.verifier.cache.prepare(self.nodes)
        self._roots.copy_(self.verifier.roots(limits))
        wide = tree.padded(self.nodes)
        for name in ("tokens", "parents", "depths", "ancestors"):
            getattr(self._tree, name).copy_(getattr(wide, name))
        self.launch()
        logits, features = self._found
        return logits[:, : tree.size], features.clone() if tree.size == 1 else features[:, : tree.size]


class CapturedDraft:
    """A drafter's pass of one depth after up to `width` new positions, launched on buffers that are filled in before.

    The drafter runs on fixed shapes (`Drafter.fixed_shapes`), as its cache does, and is given features like `like`.
    """

    def __init__(
        self, drafter: Drafter[SlotCache], cache: SlotCache, width: int, depth: int, like: Tensor, capture: Capture
    ) -> None:
        self._drafter, self._cache, self._depth = drafter, cache, depth
        device, batch = cache.lengths.device, len(cache.lengths)
        with torch.inference_mode(False), torch.no_grad():
            self._features = torch.zeros(batch, width, like.shape[-1], dtype=like.dtype, device=device)
            self._next_tokens = torch.zeros(batch, width, dtype=torch.long, device=device)
            self._counts = torch.zeros(batch, dtype=torch.long, device=device)
            self._propose()  # what the drafter makes on first use must exist before tracing
        self.launch = capture.launched(self.step, self._propose)

    def _propose(self) -> tuple[Tensor, Tensor]:
        # New entries are written after the committed ones, and are committed when the draft has been made.
        taken = self._cache.ahead()
        found = self._drafter.propose(taken, self._features, self._next_tokens, self._counts, self._depth)
        assert found is not None
        self._vocabulary = found.vocabulary
        return found.logits, found.hidden

    def step(self, run: Run) -> None:
        """Run the drafting pass over the buffers by `run`, as a launch does."""
        with torch.inference_mode(False), torch.no_grad():
            self._found = run()

    def __call__(self, features: Tensor, next_tokens: Tensor, counts: Tensor) -> Proposal:
        """Take in at most A verified positions and draft, as `Drafter.propose` does."""
        width = next_tokens.shape[1]
        # After a row's last position any valid token will do.
        self._features.zero_()
        self._next_tokens.zero_()
        self._features[:, :width] = features
        self._next_tokens[:, :width] = next_tokens
        self._counts.copy_(counts)
        self.launch()
        self._cache.advance(counts)
        return Proposal(*self._found, self._vocabulary)


class Tier:
    """Buffers and graphs on which a call's rounds run in place of its own caches, made for calls like `session`'s.

    Rounds are those of every call: the session's forward of the target, its cache and, of drafters that run on fixed
    shapes, the draft are replaced while it runs here (`taken_by`), in T slots of text and trees of at most N nodes.
    """

    def __init__(self, session: Session, slots: int, nodes: int, capture: Capture) -> None:
        request, batch = session.request, len(session.rows)
        self.slots, self.nodes, self._capture = slots, nodes, capture
        self._least = max(2, _WIDE // batch) if request.model.device.type == "cpu" else _WIDE
        # What a round accepts, unless copied text goes on beyond the draft.
        self._most = _filled_up(min(session.grower.depth + 1, nodes), least=1)
        self._session: Any = None  # the one that is loaded
        self._shift = session.verify.shift
        with torch.inference_mode(False), torch.no_grad():
            self._cache = session.cache.as_fixed(batch, slots, nodes, request.model.device, capture.memory_of)
            if self._shift is not None:
                self._shift = torch.zeros_like(self._shift, device=request.model.device)
            self._draft_cache = None
            if drafts_on_fixed_shapes(session) and nodes > 1:
                state, zeros = session.drafter_state.state, capture.memory_of("head")
                room = -(-(state.bound(slots) + self._most + MAX_DRAFT_LENGTH) // 8) * 8
                self._draft_cache = state.as_fixed(batch, room, state.lengths.device, zeros)
        self.forwards: dict[int, CapturedForward] = {}  # by nodes of the trees
        self.drafts: dict[int, CapturedDraft] = {}  # by their depth
        self.failure: Exception | None = None  # why a part could not be launched, if one could not

    def fits(self, longest: int) -> bool:
        """Tell whether there is room for one more round after `longest` committed tokens."""
        return longest + self.nodes <= self.slots

    @contextmanager
    def taken_by(self, session: Session) -> Iterator[None]:
        """Let the rounds of a session that is loaded run on this tier, and bring its own caches to where they end."""
        rows, held = _every_row(session), session.drafter_state
        cache, verify, state, propose = session.cache, session.verify, held.state, session.propose_with
        cache.release()  # its entries are on the tier now
        session.verify, session.cache = self, self._cache
        session.pace.fill_up(self._size_of)
        if self._draft_cache is not None:
            held.state, session.propose_with = self._draft_cache, self.propose
        try:
            yield
        finally:
            taken, session.cache, session.verify, self._session = session.cache, cache, verify, None
            held.state, session.propose_with = state, propose
            session.pace.fill_up(None)
            if session.request.returns_cache or not session.rows.finished:
                cache.take_rows(taken, rows)
            if self._draft_cache is not None:
                state.take_rows(self._draft_cache, rows)

    def load(self, session: Session) -> None:
        """Take over where a session stands."""
        rows = _every_row(session)
        self.failure = None
        self._verify = replace(session.verify, cache=self._cache, shift=self._shift)
        self._cache.take_rows(session.cache, rows)
        for forward in self.forwards.values():
            forward.verifier.cache._whole = True  # whatever commit was interrupted
        if self._shift is not None:
            self._shift.copy_(session.verify.shift)
        if self._draft_cache is not None:
            session.drafter_state.state.forget(0)  # the window may have become smaller
            self._draft_cache.take_rows(session.drafter_state.state, rows)
        self._session = session  # last: no tier keeps a session that it could not load

    def warm_up(self, session: Session) -> None:
        """Make what rounds need most, so that no round of the loaded session that is timed waits for it."""
        self._forward(1)
        if self._cache.states is not None:
            self._forward(self.nodes)  # modules with running states may not take trees of any size at once
        if self._draft_cache is not None:
            self._draft(self._draft_cache, session.grower.depth, session.seen.features)

    def difference(self, session: Session) -> float:
        """Return the difference of logits to the loaded session's own, relative to the largest; 0 if it is rounding."""
        limits, error = session.limits(), 0.0
        deep = min(session.verify.depth_room()) >= _DEPTH and self.nodes >= len(TRIAL_TREE)
        parents = torch.tensor([TRIAL_TREE if deep else TRIAL_TREE[:1]] * len(limits))
        runs = torch.tensor([limit > 0 for limit in limits])
        generator = torch.Generator().manual_seed(0)
        for _ in range(_TRIES):
            tokens = torch.randint(session.vocab_size, parents.shape, generator=generator)
            tree = DraftTree.from_parents(tokens, parents).to(session.rows.device)
            found, wanted = (run(tree, limits)[0].cpu()[runs] for run in (self._forward(tree.size), session.verify))
            if same(found, wanted):
                return 0.0
            error = difference(found, wanted)
        return error

    # ---- in the place of a session's own parts ------------------------------------------------------

    def depth_room(self) -> list[int]:
        """See `Verifier.depth_room`."""
        return self._verify.depth_room()

    def __call__(self, tree: DraftTree, limits: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Compute logits [B, N, V] and features [B, N, F] of a tree, uncaptured if the launch fails."""
        session = self._session
        try:
            forward = self._forward(tree.size)
            session.cache = forward.verifier.cache
            return forward(tree, limits)
        except Exception as failure:
            self.failure = failure
            session.cache = self._cache
            return self._verify(tree, limits)

    def _forward(self, nodes: int) -> CapturedForward:
        """Return the forward for trees of that many nodes, filled up to a power of two; captured when first needed."""
        size = self._size_of(nodes)
        if size not in self.forwards:
            verifier = replace(self._verify, cache=self._cache.for_nodes())
            self._session.pace.leave_out()  # making a part is no cost of a round
            self.forwards[size] = CapturedForward(verifier, len(self._cache.lengths), size, self._capture)
        return self.forwards[size]

    def _size_of(self, nodes: int) -> int:
        """Return the nodes of the forward that trees of that many nodes are run by."""
        return nodes if nodes == 1 else min(_filled_up(nodes, self._least), self.nodes)

    def propose(
        self, state: Any, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None, score: Score
    ) -> Proposal | None:
        """Take in verified positions and draft, as `Drafter.propose_ranked`; uncaptured if the launch fails."""
        drafter, seen = self._session.request.drafter, Verified(features, next_tokens, counts)
        if seen.next_tokens.shape[1] > self._most:
            before, seen = seen.split(self._most)
            for part in before.parts(self._most):
                state.forget(self._most)
                drafter.extend(state, *part)
        depth = depth or drafter.draft_length
        state.forget(self._most + depth)
        try:
            return self._draft(state, depth, features)(*seen)
        except Exception as failure:
            self.failure = failure
            return drafter.propose(state, *seen, depth)

    def _draft(self, cache: SlotCache, depth: int, like: Tensor) -> CapturedDraft:
        """Return the draft of that depth from features such as these; made when it is first needed."""
        if depth not in self.drafts:
            drafter = self._session.request.drafter
            self._session.pace.leave_out()
            self.drafts[depth] = CapturedDraft(drafter, cache, self._most, depth, like, self._capture)
        return self.drafts[depth]


def drafts_on_fixed_shapes(session: Session) -> bool:
    """Tell whether a session's drafter can run on fixed shapes where the target is."""
    drafter: Any = session.request.drafter
    return drafter.fixed_shapes and drafter.device == session.request.model.device


def _every_row(session: Session) -> list[tuple[int, int]]:
    """Return each row twice: its place in the session's caches and in the tier's."""
    return [(row, row) for row in range(len(session.rows))]


def _filled_up(size: int, least: int) -> int:
    """Return the next power of two, or `least`."""
    return max(least, 1 << (size - 1).bit_length())
