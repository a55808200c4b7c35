"""`Seats`: calls of one row each, whose trees are verified together, and which come and go between two rounds.

Each call keeps what is its own: text, noise, processors, criteria, drafts and statistics are those of a call that runs
alone, so that it writes what it writes alone, whatever the others do. Shared is the target's cache, of which each call
has a row, and its forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_dart.cache.target_cache import TargetCache
from hf_dart.decoding.round import accept, drafted
from hf_dart.decoding.session import Session
from hf_dart.models.devices import host_by_default
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
        if verify is None:
            verify = Verifier(like.target, session.cache.of_seats(1), like.kinds, like.feature_layers)
        elif like.target is verify.target and like.feature_layers == verify.feature_layers:
            verify.cache.resize(len(self.taken) + 1)
        else:
            raise ValueError("Seats share one target, and drafters that read the same of its layers; make other Seats.")
        self._verify = verify
        self.taken.append(_Seat(verify, len(self.taken), session))

    @torch.no_grad()
    def leave(self, session: Session) -> None:
        """Let a call go, whose cache is its own again; no other call notices."""
        (seat,) = (one for one in self.taken if one.session is session)
        seat.leave()
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
        seats = [seat for seat in self.taken if not seat.session.rows.finished]
        ready = [seat for seat in seats if seat.tries(seat.draft)]
        if ready:
            self._run(ready)
        gone = [seat for seat in self.taken if seat.failure or seat.session.rows.finished]
        for seat in gone:
            self.leave(seat.session)
        return [(seat.session, seat.failure) for seat in gone]

    def _run(self, seats: list[_Seat]) -> None:
        """Verify the trees of some calls in one forward, and let each take its own tokens."""
        assert self._verify is not None
        cache, size = self._verify.cache, max(seat.tree.size for seat in seats)
        rows = {seat.place: seat for seat in seats}
        limits = [rows[place].limit if place in rows else 0 for place in range(len(self.taken))]
        alone = DraftTree.chain(torch.zeros_like(seats[0].tree.tokens[:, :1])).padded(size)
        trees = [rows[place].tree.padded(size) if place in rows else alone for place in range(len(limits))]
        tree = DraftTree(
            torch.cat([one.tokens for one in trees]),
            torch.cat([one.parents for one in trees]),
            torch.cat([one.depths for one in trees]),
            torch.cat([one.ancestors for one in trees]),
            max_depth=max(one.max_depth for one in trees),
        )
        logits, features = self._verify(tree, limits)
        width = tree.max_depth + 1
        path, counts = torch.zeros(len(limits), width, dtype=torch.long), [0] * len(limits)
        for seat in seats:
            row, nodes = slice(seat.place, seat.place + 1), slice(seat.tree.size)
            if seat.tries(seat.accept, logits[row, nodes], features[row, nodes]):
                counts[seat.place] = seat.counts
                path[seat.place, : seat.path.shape[1]] = seat.path[0]
        cache.commit(path, counts)


class _Seat:
    """A call in its seat, in the place of its own `verify` and `cache`.

    Args:
        verify: of all seats.
        place: of this one.
        session: the call.
    """

    hidden_states: tuple[Tensor, ...] = ()

    def __init__(self, verify: Verifier, place: int, session: Session) -> None:
        self._verify, self.place, self.session = verify, place, session
        self.failure: Exception | None = None
        self._own = session.verify, session.cache
        self.cache.take_rows(session.cache, [(place, 0)])
        session.cache.release()
        held: Any = self
        session.verify = session.cache = held

    def tries(self, step: Any, *given: Any) -> bool:
        """Take a step; False, with the error kept, if it raises one."""
        try:
            step(*given)
        except Exception as failure:
            self.failure = failure
            return False
        return True

    def draft(self) -> None:
        """Draft the tree of the coming round."""
        self.tree, self._budget = drafted(self.session)
        (self.limit,) = self._budget.limits

    def accept(self, logits: Tensor, features: Tensor) -> None:
        """Emit what the target accepts of the tree, from logits [1, N, V] and features [1, N, F]."""
        accept(self.session, self.tree, self._budget, logits, features)

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
