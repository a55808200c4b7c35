"""`Seats`: calls of one row each that are drafted and verified together, and come and go between two rounds.

Each call keeps what is its own: text, noise, processors, criteria and statistics are those of a call that runs alone,
so that it writes what it writes alone, whatever the others do. Shared are the target's cache and the drafter's state,
of which each call has a row, the forward of either, and the pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.decoding.grow import TreeGrower
from hf_dart.decoding.pace import Pace
from hf_dart.decoding.session import Budget, Session, accept, one_round
from hf_dart.decoding.stats import DraftStats
from hf_dart.drafters.base import Proposal, Verified
from hf_dart.models.devices import host_by_default
from hf_dart.models.positions import moving_rotary
from hf_dart.models.processes import is_shared
from hf_dart.trees.tree import DraftTree


class Seats:
    """Seats in which up to `size` calls of one target, drafter and tree config run (`hf_dart.decoding.api.requested`).

    Attributes:
        taken: the calls that run, in the rows of what they share.
    """

    def __init__(self, size: int) -> None:
        self.size, self.taken = size, list[_Seat]()
        self._stats = DraftStats()  # times of all rounds

    @property
    def free(self) -> int:
        """Number of seats that are free."""
        return self.size - len(self.taken)

    @host_by_default
    @torch.no_grad()
    def take(self, session: Session) -> None:
        """Let a call that has been opened run in a free seat, if it is of the kind of the others."""
        if not self.free:
            raise ValueError(f"All {self.size} seats are taken; call round() until one is free.")
        like, request, state = session.verify, session.request, session.drafter_state.state
        moving = moving_rotary(like.target)
        if moving is not None and session.cache.longest > moving[0]:  # the longest row of a forward decides for all
            raise ValueError(
                f"Seats take prompts of up to {moving[0]} tokens of this target, whose rotary frequencies are others "
                "beyond that; call generate for longer ones."
            )
        kind = like.target, request.drafter, request.tree_config
        if not self.taken:
            self._kind = kind
            # What the first call has is shared as it is, unless the call is to hand it back.
            cache, returned = session.cache, request.returns_cache
            self._verify: Any = replace(like, cache=cache.of_a_seat() if returned else cache)
            self._state = state if type(state) is SlotCache and not request.tree_config.refine else None
            if self._state is not None and returned:
                self._state = state.like(state.lengths.new_zeros(1), state.capacity)
        elif kind != self._kind:
            raise ValueError("Seats share one target, one drafter and one TreeConfig; make other Seats.")
        if len(self.taken) > 1:  # whose pace ends here
            self._pace.finish(request.drafter)
        seat = _Seat(self, session)
        try:
            for own, ours in self._shared(seat):
                if self.taken:
                    ours.resize(len(self.taken) + 1)
                if own is not ours:
                    ours.take_rows(own, [(len(self.taken), 0)])
                    own.release()
        except BaseException:  # out of memory: the others go on
            for _, ours in self._shared(seat) if self.taken else ():
                ours.resize(len(self.taken))
            self._verify.cache._whole = True  # of their rows nothing was written
            raise
        self.taken.append(seat)
        self._change()

    @torch.no_grad()
    def leave(self, session: Session) -> None:
        """Let a call go, whose cache is its own again as far as anybody will look at it; no other call notices."""
        (seat,) = (one for one in self.taken if one.session is session)
        place, last = self.taken.index(seat), self.taken.pop()
        session.verify, session.cache, session.pace, session.drafter_state.state = seat.own
        for own, ours in self._shared(seat):
            if session.request.returns_cache:
                try:
                    own.take_rows(ours, [(0, place)])
                except RuntimeError as failure:  # out of memory: the others go on
                    seat.failure = seat.failure or failure
            if last is not seat:
                ours.take_rows(ours, [(place, len(self.taken))])
            if self.taken:
                ours.resize(len(self.taken))
        if last is not seat:
            self.taken[place] = last
        self._pace.finish(session.request.drafter)
        if self.taken:
            self._change()
        else:
            del self._verify, self._state, self._kind

    def _shared(self, seat: _Seat) -> list[tuple[Any, Any]]:
        """Return what a call has of its own while it has no seat, each with what all calls share in its place."""
        shared: list[tuple[Any, Any]] = [(seat.own[1], self._verify.cache)]
        if self._state is not None:
            shared.append((seat.own[3], self._state))
        return shared

    def _change(self) -> None:
        """Begin with another number of calls; what the rounds of so many have shown before is known."""
        like, count = self.taken[0].session, len(self.taken)
        shifts = [seat.own[0].shift for seat in self.taken]
        self._verify.shift = None
        if any(shift is not None for shift in shifts):
            known = [torch.zeros(1, dtype=torch.long) if shift is None else shift for shift in shifts]
            self._verify.shift = torch.cat(torch.broadcast_tensors(*known), dim=-1)
        for seat in self.taken:
            held: Any = seat
            seat.session.verify = seat.session.cache = seat.session.pace = held
        if count == 1:  # which runs as it does without seats
            like.verify, like.cache, self._pace = self._verify, self._verify.cache, self.taken[0].own[2]
            like.pace, like.drafter_state.state = self._pace, self._state or self.taken[0].own[3]
            self._pace.leave_out()
            return
        request, device = like.request, like.request.device.type
        config, drafter = request.tree_config, request.drafter
        records = None if is_shared(request.model) else drafter.pace_records
        kind = (("joint", id(request.model), config, count),)
        self._pace = Pace(config, device, count, like.grower.depth, request.timed, records, kind)
        self._pace.leave_out()  # a round that began with other calls
        alike: dict[Any, list[int]] = {}  # ranked in one way; those that look at their drafts again do so alone
        for row, seat in enumerate(self.taken):
            key = seat.session.grower.ranks_by, seat.session.noise is None, row if config.refine else 0
            alike.setdefault(key, []).append(row)
        growers = [[self.taken[row].session.grower for row in rows] for rows in alike.values()]
        most = config.resolve_nodes(count, device)  # nodes of a tree
        joint = [TreeGrower.joint(one, most, self._pace.cost) for one in growers]
        self._growers = list(zip(alike.values(), joint, strict=True))

    @host_by_default
    @torch.no_grad()
    def round(self) -> list[tuple[Session, BaseException | None]]:
        """Run one round of every call, and return those that have left their seats, done or ended by an error.

        `api.close_call` gives the output of those without an error.
        """
        try:
            if self.taken:
                self._run()
        except Exception as failure:  # of what they share
            for seat in self.taken:
                seat.failure = failure
        gone = [seat for seat in self.taken if seat.failure or seat.session.rows.finished]
        for seat in gone:
            self.leave(seat.session)
        return [(seat.session, seat.failure) for seat in gone]

    def _run(self) -> None:
        """Verify the trees of all calls in one forward, and let each take its own tokens."""
        if len(seats := self.taken) == 1:
            one_round(seats[0].session)
            return
        timed, late = DraftStats(), DraftStats()
        grown = self._trees(timed)
        size = max(tree.size for tree, _ in grown)
        trees = [tree.padded(size) for tree, _ in grown]
        parts = zip(*((one.tokens, one.parents, one.depths, one.ancestors) for one in trees), strict=True)
        tokens, parents, depths, ancestors = map(torch.cat, parts)
        tree = DraftTree(tokens, parents, depths, ancestors, max_depth=max(one.max_depth for one in trees))
        with timed.phase("verify"):
            logits, features = self._verify(tree, [budget.limits[0] for _, budget in grown])
        for seat in seats:
            seat.session.stats.add_times(timed, 1 / len(seats))
        path, counts = torch.zeros(len(seats), tree.max_depth + 1, dtype=torch.long), [0] * len(seats)
        for place, (seat, (own, budget)) in enumerate(zip(seats, grown, strict=True)):
            row, nodes = slice(place, place + 1), slice(own.size)
            try:
                with timed.phase("walk"):
                    accepted = accept(seat.session, own, budget, logits[row, nodes], features[row, nodes])
                seat.session.tell(logits[row, nodes], accepted)
            except BaseException as failure:  # of what the call was given, which may exit, too
                seat.failure = failure
            else:
                counts[place] = seat.counts
                path[place, : seat.path.shape[1]] = seat.path[0]
        with timed.phase("commit"), late.phase("commit"):
            self._verify.cache.commit(path, counts)
        for seat in seats:
            seat.session.stats.add_times(late, 1 / len(seats))
        self._stats.add_times(timed)
        if not any(seat.failure for seat in seats):
            told = [seat.tokens for seat in seats], [seat.limit for seat in seats]
            self._pace.count(self._is_drafted, *told, size, tree.max_depth, self._stats.processor_seconds)

    # ---- drafts -------------------------------------------------------------------------------------

    def _trees(self, timed: DraftStats) -> list[tuple[DraftTree, Budget]]:
        """Return the tree [1, N] of each call in the coming round, and what it may emit."""
        sessions = [seat.session for seat in self.taken]
        with timed.phase("draft"):
            budgets = [session.budget() for session in sessions]
            found, deepest = [one.copies[0] for one in budgets], [one.deepest[0] for one in budgets]
            self._is_drafted, copies = self._pace.choose(found, [1 / len(sessions)] * len(sessions), deepest)
            parts = zip(budgets, copies, strict=True)
            budgets = [replace(budget, drafted=self._is_drafted, copies=[one]) for budget, one in parts]
            for session in sessions:
                session.draw_noise(self._is_drafted, timed)
            seen = [session.unread(self._is_drafted) for session in sessions]
            proposals = self._proposals(sessions, [one for one in seen if one is not None])
        trees: dict[int, DraftTree] = {}
        with timed.phase("grow"):
            for rows, grower in self._growers:
                own, these = [sessions[row] for row in rows], [budgets[row] for row in rows]
                deepest, copies = [one.deepest[0] for one in these], [one.copies[0] for one in these]
                given: tuple[Any, Any, list[int], Any] = None, None, deepest, None
                if proposals:
                    drafts = [proposals[row] for row in rows]
                    drafted = Proposal.joint([draft.within(own[0].vocab_size) for draft in drafts])
                    noise = [session.noise_ahead(0, grower.depth, drafted.vocabulary) for session in own]
                    known = [one.to(drafted.logits.device) for one in noise if one is not None]
                    given = drafted, torch.cat(known) if known else None, deepest, partial(own[0].refine, drafts[0])
                weights = [1 / len(rows)] * len(rows)
                grown = grower(*given, weights, None, copies, partial(timed.phase, "draft"))
                trees |= {row: grown.row(number) for number, row in enumerate(rows)}
        return [(trees[row], budget) for row, budget in enumerate(budgets)]

    def _proposals(self, sessions: list[Session], seen: list[Verified]) -> list[Proposal]:
        """Return the draft of each call after the positions that are new to it; none in a pause, or if one has none."""
        if not seen:
            return []
        depth = sessions[0].grower.depth
        if self._state is None:
            calls = zip(sessions, seen, strict=True)
            found = [s.propose_with(s.drafter_state.state, *new, depth, s.score) for s, new in calls]
            drafts = [draft for draft in found if draft is not None]
            return drafts if len(drafts) == len(found) else []

        def score(depth: int, logits: Tensor) -> Tensor:
            """See `Session.score`, for logits [B, W, V] of all calls."""
            return torch.cat([session.score(depth, logits[row : row + 1]) for row, session in enumerate(sessions)])

        width = max(one.next_tokens.shape[1] for one in seen)
        parts = zip(*(one.padded(width) for one in seen), strict=True)  # some may lie on the host
        features, tokens, counts = (torch.cat([one.to(part[0].device) for one in part]) for part in parts)
        draft = sessions[0].propose_with(self._state, features, tokens, counts, depth, score)
        return [] if draft is None else [draft.row(row) for row in range(len(seen))]


class _Seat:
    """A call in its seat, in the place of its own `verify`, `cache` and `pace` while there are others.

    Attributes:
        session: the call.
        own: those three, and the drafter's state.
        failure: the error that ends the call; None for none.
        path, counts, tokens, limit: outcome of its last round.
    """

    failure: BaseException | None = None
    path: Tensor
    tokens: Sequence[int]

    def __init__(self, seats: Seats, session: Session) -> None:
        self._seats, self.session = seats, session
        self.own = session.verify, session.cache, session.pace, session.drafter_state.state

    def depth_room(self) -> list[int]:
        """See `Verifier.depth_room`."""
        return [self._seats._verify.depth_room()[self._seats.taken.index(self)]]

    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Note what is to be committed with what the other calls have accepted."""
        self.path, (self.counts,) = path, counts

    def choose(self, copies: Any, *_: Any) -> tuple[bool, Any]:
        """Leave the choice to the pace of all calls."""
        return False, copies

    def count(self, drafted: bool, tokens: list[list[int]], limits: list[int], *_: Any) -> None:
        """Take note of what the call emitted."""
        (self.tokens,), (self.limit,) = tokens, limits
