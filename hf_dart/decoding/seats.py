"""`Seats`: calls of one row each, whose trees are verified together, and which come and go between two rounds.

Each call keeps what is its own: text, noise, processors, criteria and statistics are those of a call that runs alone,
so that it writes what it writes alone, whatever the others do. Shared is the target's cache, of which each call has a
row, and its forward; and drafts are made together (`decoding.joint`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dart.cache.target_cache import TargetCache
from hf_dart.decoding.joint import JointDrafts
from hf_dart.decoding.round import accept
from hf_dart.decoding.session import Budget, Session
from hf_dart.decoding.stats import DraftStats
from hf_dart.models.devices import host_by_default
from hf_dart.models.positions import moving_rotary
from hf_dart.models.verify import Verifier
from hf_dart.trees.tree import DraftTree


class Seats:
    """Seats in which calls of one target and one kind of drafter run (`hf_dart.decoding.api.requested`).

    Args:
        size: how many calls run at a time.

    Attributes:
        taken: the calls that run, in the rows of the cache.
    """

    def __init__(self, size: int) -> None:
        self.size, self.taken = size, list[_Seat]()
        self._verify: Verifier | None = None  # of as many rows as seats are taken
        self._joint: list[JointDrafts] = []
        self._stats, self._timed = DraftStats(), DraftStats()  # times of all rounds, and of a part of one

    @property
    def free(self) -> int:
        """Number of seats that are free."""
        return self.size - len(self.taken)

    @host_by_default
    @torch.no_grad()
    def take(self, session: Session) -> None:
        """Let a call that has been opened run in a free seat.

        Raises:
            ValueError: there is none, or its target, drafter or positions are of another kind than the others'.
        """
        if not self.free:
            raise ValueError(f"All {self.size} seats are taken; call round() until one is free.")
        like, verify = session.verify, self._verify
        if like.shift is not None:
            raise ValueError("Seats take prompts at their usual positions, and this one is not; call generate for it.")
        moving = moving_rotary(like.target)
        if moving is not None and session.cache.longest > moving[0]:  # the longest row of a forward decides for all
            raise ValueError(
                f"Seats take prompts of up to {moving[0]} tokens of this target, whose rotary frequencies are others "
                "beyond that; call generate for longer ones."
            )
        if verify is None:
            verify = Verifier(like.target, session.cache.of_seats(1), like.kinds, like.feature_layers)
        elif like.target is verify.target and like.feature_layers == verify.feature_layers:
            verify.cache.resize(len(self.taken) + 1)
        else:
            raise ValueError("Seats share one target, and drafters that read the same of its layers; make other Seats.")
        self._verify = verify
        joint = next((one for one in self._joint if one.takes(session)), None)
        if joint is None:
            joint = JointDrafts(session)
            self._joint.append(joint)
        self.taken.append(_Seat(verify, len(self.taken), session, joint))
        joint.add(session)

    @torch.no_grad()
    def leave(self, session: Session) -> None:
        """Let a call go, whose cache is its own again; no other call notices."""
        (seat,) = (one for one in self.taken if one.session is session)
        seat.leave()
        seat.joint.remove(session)
        if not seat.joint.sessions:
            self._joint.remove(seat.joint)
        last = self.taken.pop()
        if not self.taken:
            self._verify = None  # and with it the cache
            return
        cache = last.cache
        if seat is not last:
            cache.take_rows(cache, [(seat.place, last.place)])
            last.place, self.taken[seat.place] = seat.place, last
        cache.resize(len(self.taken))

    @host_by_default
    @torch.no_grad()
    def round(self) -> list[tuple[Session, Exception | None]]:
        """Run one round of every call.

        Returns:
            The calls that are done and have left their seats, each with the error that ended it, if one did.
            `api.close_call` gives the output of the others.
        """
        self._timed = DraftStats()
        for joint in self._joint:
            self._draft(joint)
        ready = [seat for seat in self.taken if not seat.failure]
        if ready:
            self._run(ready)
        self._share_times(self._timed, ())
        for joint in self._joint:
            seats = self._of(joint)
            if not any(seat.failure for seat in seats):
                joint.count([seat.tree for seat in seats], self._stats.processor_seconds)
        gone = [seat for seat in self.taken if seat.failure or seat.session.rows.finished]
        for seat in gone:
            self.leave(seat.session)
        return [(seat.session, seat.failure) for seat in gone]

    def _of(self, joint: JointDrafts) -> list[_Seat]:
        """Return the seats of the calls that are drafted together, in their order there."""
        seats = {id(seat.session): seat for seat in self.taken}
        return [seats[id(session)] for session in joint.sessions]

    def _draft(self, joint: JointDrafts) -> None:
        """Draft the trees of calls that are drafted together; an error ends all of them."""
        seats = self._of(joint)
        try:
            for seat, drafted in zip(seats, joint.draft(self._timed), strict=True):
                seat.tree, seat.budget = drafted
        except Exception as failure:
            for seat in seats:
                seat.failure = failure

    def _run(self, seats: list[_Seat]) -> None:
        """Verify the trees of some calls in one forward, and let each take its own tokens."""
        assert self._verify is not None
        cache, size = self._verify.cache, max(seat.tree.size for seat in seats)
        rows = {seat.place: seat for seat in seats}
        limits = [rows[place].budget.limits[0] if place in rows else 0 for place in range(len(self.taken))]
        alone = DraftTree.chain(torch.zeros_like(seats[0].tree.tokens[:, :1])).padded(size)
        trees = [rows[place].tree.padded(size) if place in rows else alone for place in range(len(limits))]
        tree = DraftTree(
            torch.cat([one.tokens for one in trees]),
            torch.cat([one.parents for one in trees]),
            torch.cat([one.depths for one in trees]),
            torch.cat([one.ancestors for one in trees]),
            max_depth=max(one.max_depth for one in trees),
        )
        with self._timed.phase("verify"):
            logits, features = self._verify(tree, limits)
        self._share_times(self._timed, seats)
        self._timed = DraftStats()
        path, counts = torch.zeros(len(limits), tree.max_depth + 1, dtype=torch.long), [0] * len(limits)
        with self._timed.phase("walk"):
            for seat in seats:
                row, nodes = slice(seat.place, seat.place + 1), slice(seat.tree.size)
                if seat.accept(logits[row, nodes], features[row, nodes]):
                    counts[seat.place] = seat.counts
                    path[seat.place, : seat.path.shape[1]] = seat.path[0]
        with self._timed.phase("commit"):
            cache.commit(path, counts)

    def _share_times(self, timed: DraftStats, seats: Sequence[_Seat]) -> None:
        """Add times to those of all rounds, and to the statistics of the calls that spent them together."""
        for name in ("seconds", "processor_seconds"):
            for phase, spent in getattr(timed, name).items():
                getattr(self._stats, name)[phase] += spent
                for seat in seats:
                    getattr(seat.session.stats, name)[phase] += spent / len(seats)


class _Seat:
    """A call in its seat, in the place of its own `verify` and `cache`.

    Args:
        verify: of all seats.
        place: of this one.
        session: the call.
        joint: what drafts for it.

    Attributes:
        tree, budget: of the coming round.
        failure: the error that ends the call; None for none.
    """

    hidden_states: tuple[Tensor, ...] = ()
    tree: DraftTree
    budget: Budget

    def __init__(self, verify: Verifier, place: int, session: Session, joint: JointDrafts) -> None:
        self._verify, self.place, self.session, self.joint = verify, place, session, joint
        self.failure: Exception | None = None
        self._own = session.verify, session.cache
        self.cache.take_rows(session.cache, [(place, 0)])
        session.cache.release()
        held: Any = self
        session.verify = session.cache = held

    def accept(self, logits: Tensor, features: Tensor) -> bool:
        """Emit what the target accepts of the tree, from logits [1, N, V] and features [1, N, F].

        Returns:
            False, with the error kept, where one is raised.
        """
        try:
            accept(self.session, self.tree, self.budget, logits, features)
        except Exception as failure:
            self.failure = failure
        return self.failure is None

    def depth_room(self) -> list[int]:
        """See `Verifier.depth_room`."""
        return [self._verify.depth_room()[self.place]]

    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Note what is to be committed with what the other calls have accepted."""
        self.path, (self.counts,) = path, counts

    @property
    def cache(self) -> TargetCache:
        """The cache that all seats share."""
        return self._verify.cache

    def leave(self) -> None:
        """Give the call its own cache again, as far as anybody will look at it."""
        session = self.session
        session.verify, session.cache = self._own
        if session.request.returns_cache:
            session.cache.take_rows(self.cache, [(0, self.place)])
