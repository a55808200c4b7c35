"""`JointDrafts`: drafts of calls that share a forward, made together: one pass of the drafter, one pace, joint trees.

Drafts one by one would cost as much as in calls that run alone, while the forward that they share costs each call less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.decoding.grow import TreeGrower
from hf_dart.decoding.pace import CHAIN, PAUSE, Pace
from hf_dart.decoding.session import Budget, Session
from hf_dart.decoding.stats import DraftStats
from hf_dart.drafters.base import Proposal, Verified
from hf_dart.models.processes import is_shared
from hf_dart.trees.tree import DraftTree


class JointDrafts:
    """Drafts of calls of one row each whose trees are shaped alike; how many changes between rounds.

    Args:
        like: the first of the calls.

    Attributes:
        sessions: the calls, in the rows of the state that the drafter keeps of all of them.
        pace: of their rounds.
    """

    def __init__(self, like: Session) -> None:
        self._drafter, self._config = like.request.drafter, like.request.tree_config
        self.sessions: list[Session] = []
        state = like.drafter_state.state
        shares = type(state) is SlotCache and not self._config.refine
        self._state = state.like(state.lengths.new_zeros(1), state.capacity) if shares else None
        self._own: dict[int, tuple[Any, Pace]] = {}

    def takes(self, session: Session) -> bool:
        """Return True if a call can be drafted with these; those that look at their drafts again are drafted alone."""
        request = session.request
        return request.drafter is self._drafter and request.tree_config == self._config and not self._config.refine

    def add(self, session: Session) -> None:
        """Draft for a call, too, in the next rounds."""
        place = len(self.sessions)
        self._own[id(session)] = session.drafter_state.state, session.pace
        if self._state is not None:
            if place:
                self._state.resize(place + 1)
            self._state.take_rows(session.drafter_state.state, [(place, 0)])
            session.drafter_state.state.release()
        told: Any = _Told()
        session.pace = told
        self.sessions.append(session)
        self._change()

    def remove(self, session: Session) -> None:
        """Let a call go, whose state is its own again as far as anybody will look at it."""
        place = next(number for number, one in enumerate(self.sessions) if one is session)
        state, session.pace = self._own.pop(id(session))
        last = self.sessions.pop()
        if self._state is not None:
            if session.request.returns_cache:
                state.take_rows(self._state, [(0, place)])
            if last is not session:
                self._state.take_rows(self._state, [(place, len(self.sessions))])
        if last is not session:
            self.sessions[place] = last
        self.pace.finish(self._drafter)
        if self.sessions:
            if self._state is not None:
                self._state.resize(len(self.sessions))
            self._change()

    def _change(self) -> None:
        """Begin with another number of calls; what the rounds of so many have shown before is known."""
        like, count = self.sessions[0], len(self.sessions)
        request, device = like.request, like.rows.device.type
        kind = "joint", self._config, count
        records = None if is_shared(request.model) else self._drafter.pace_records
        self.pace = Pace(self._config, device, count, like.grower.depth, request.timed, records, kind)
        self._most = self._config.resolve_nodes(count, device)  # nodes of a tree
        self.pace.leave_out()  # a round that began with other calls

    def draft(self, stats: DraftStats) -> list[tuple[DraftTree, Budget]]:
        """Return the tree [1, N] of each call in the coming round, and what it may emit.

        Args:
            stats: of which the phases are timed.
        """
        sessions = self.sessions
        with stats.phase("draft"):
            budgets = [session.budget() for session in sessions]
            found, deepest = [one.copies[0] for one in budgets], [one.deepest[0] for one in budgets]
            self._mode, copies = self.pace.choose(found, [1 / len(sessions)] * len(sessions), deepest)
            parts = zip(budgets, copies, strict=True)
            budgets = [replace(budget, mode=self._mode, copies=[one]) for budget, one in parts]
            seen = [session.unread(self._mode) for session in sessions]
            proposals = self._proposals([one for one in seen if one is not None])
        alike: dict[Any, list[int]] = {}  # ranked in one way
        for row, session in enumerate(sessions):
            alike.setdefault((session.grower.ranks_by, session.noise is None), []).append(row)
        trees: dict[int, DraftTree] = {}
        with stats.phase("grow"):
            for rows in alike.values():
                grown = self._grow(rows, proposals, budgets)
                trees |= {row: grown.row(number) for number, row in enumerate(rows)}
        return [(trees[row], budget) for row, budget in enumerate(budgets)]

    def _proposals(self, seen: list[Verified]) -> list[Proposal]:
        """Return the draft of each call after the positions that are new to it; none in a pause, or of no drafter."""
        if not seen:
            return []
        depth = self.sessions[0].grower.depth
        if self._state is None:
            calls = zip(self.sessions, seen, strict=True)
            drafts = [s.propose_with(s.drafter_state.state, *new, depth, s.score) for s, new in calls]
            return [draft for draft in drafts if draft is not None]
        width = max(one.next_tokens.shape[1] for one in seen)
        features, tokens, counts = (torch.cat(part) for part in zip(*(one.padded(width) for one in seen), strict=True))
        draft = self._drafter.propose_ranked(self._state, features, tokens, counts, depth, self._score)
        return [] if draft is None else [draft.row(row) for row in range(len(seen))]

    def _score(self, depth: int, logits: Tensor) -> Tensor:
        """See `Session.score`, for logits [B, W, V] of all calls."""
        return torch.cat([session.score(depth, logits[row : row + 1]) for row, session in enumerate(self.sessions)])

    def _grow(self, rows: list[int], proposals: list[Proposal], budgets: list[Budget]) -> DraftTree:
        """Grow the trees of some calls, which are ranked in one way."""
        sessions, budgets = [self.sessions[row] for row in rows], [budgets[row] for row in rows]
        grower = TreeGrower.joint([session.grower for session in sessions], self._most, self.pace.cost)
        deepest = [budget.deepest[0] for budget in budgets]
        copies = [budget.copies[0] for budget in budgets]
        weights = [1 / len(rows)] * len(rows)
        if not proposals:
            return grower(None, None, deepest, weights=weights, copies=copies)
        drafted = Proposal.joint([proposals[row].within(sessions[0].vocab_size) for row in rows])
        noise = [session.noise_ahead(0, grower.depth) for session in sessions]
        gumbel = None if noise[0] is None else torch.cat([one for one in noise if one is not None])
        refine = partial(sessions[0].refine, proposals[rows[0]])
        return grower(drafted, gumbel, deepest, refine, self._mode == CHAIN, weights, None, copies)

    def count(self, trees: list[DraftTree], seconds: Mapping[str, float]) -> None:
        """Learn from the round that has been run.

        Args:
            trees: as `draft` returned them.
            seconds: spent in each phase so far, of all calls.
        """
        told: list[Any] = [session.pace for session in self.sessions]
        tokens, limits = [one.tokens for one in told], [one.limit for one in told]
        nodes, levels = (max(getattr(tree, name) for tree in trees) for name in ("size", "max_depth"))
        self.pace.count(self._mode, tokens, limits, nodes, levels, seconds)


class _Told:
    """The outcome of a call's last round, in the place of a pace of its own."""

    tokens: Sequence[int] = ()
    limit = 0

    def looks_for_copies(self) -> bool:
        """Look for copies in every round: the pace of all calls needs them."""
        return True

    def choose(self, copies: Any, *_: Any) -> tuple[str, Any]:
        """Leave the choice to the pace of all calls."""
        return PAUSE, copies

    def count(self, mode: str, tokens: list[list[int]], limits: list[int], *_: Any) -> None:
        """Take note of what the call emitted."""
        (self.tokens,), (self.limit,) = tokens, limits
