"""`Engine`: which calls take the captured round, and what is kept for them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from transformers import PreTrainedModel

from hf_dart.cache.hybrid import HybridCache
from hf_dart.decoding.round import one_round
from hf_dart.decoding.session import Session
from hf_dart.engine.calls import head_job, job_of, signature
from hf_dart.engine.compiling import Backend
from hf_dart.engine.config import EngineConfig
from hf_dart.engine.forward import Forward
from hf_dart.engine.graphs import Capture, Pool, memory_pool
from hf_dart.engine.job import HeadJob, Job
from hf_dart.engine.loop import run
from hf_dart.engine.memory import Memory
from hf_dart.engine.shapes import shapes_of
from hf_dart.engine.state import Shape, filled_up
from hf_dart.engine.tier import Tier

_WORTH_A_MOVE = 64
"""Tokens that a row has left to emit when its batch moves to rounds for fewer rows."""
_KEPT = 16
"""Tiers that an engine keeps; the one that has not been used for longest goes first."""

_Kept = TypeVar("_Kept", Tier, Forward)


class _Refused(NamedTuple):
    """Why there is no tier.

    Attributes:
        computes_otherwise: rounds of this kind do not work with the target, however often they are made.
        passing: another time it may be made.
    """

    reason: str
    computes_otherwise: bool = False
    passing: bool = False


class Engine:
    """The captured rounds of one target and one head; `hf_dart.compile` makes it and the head keeps it.

    Each is made when a call first needs it. Calls that it does not take whole run eager rounds, around a captured
    forward where that can be, and the first of each kind warns why. Calls of another target, and of other threads
    while one call uses it, run the eager round without a warning. Copies of a head have none.
    """

    def __init__(self, target: PreTrainedModel, config: EngineConfig, progress: Callable[[str], object]) -> None:
        self.target, self.config = ref(target), config
        self._progress = progress
        self._busy = Lock()
        self._warned: set[str] = set()
        self._tiers: dict[tuple[Any, ...], Tier | None] = {}
        self._forwards: dict[tuple[Any, ...], Forward | None] = {}
        self.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @property
    def tiers(self) -> list[Tier | None]:
        """The captured rounds that are kept, the one used last at the end; None for one that could not be made."""
        return [*self._tiers.values()]

    @property
    def forwards(self) -> list[Forward | None]:
        """The captured forwards that are kept, for calls that take no captured rounds; as `tiers` otherwise."""
        return [*self._forwards.values()]

    def release(self) -> None:
        """Free all graphs and buffers; they are made again when they are needed."""
        self._made_for: tuple[Any, ...] = ()
        kept = bool(self._tiers or self._forwards)
        self._clear()
        self._hands_down = True  # does the target hand arguments down to our attention, as far as is known?
        if kept:
            gc.collect()  # rounds refer to themselves, by what was compiled of them

    def _clear(self) -> None:
        self._tiers, self._forwards = {}, {}
        self._wanted: set[Shape] = set()  # by earlier calls, which went on without
        self._missed: set[Shape] = set()  # by calls so far
        self._memory = Memory()
        self._pool: Pool | None = None  # a new one with the next graph: a pool may end with its last graph

    def _made(self, make: Callable[[], _Kept]) -> _Kept:
        """What `make` makes; where memory is short, in the place of all that was kept."""
        try:
            return make()
        except torch.OutOfMemoryError:
            pass  # the error holds what was made so far, and is gone after this line
        self._clear()
        gc.collect()  # also what was half made
        return make()

    def _capture(self, job: Job) -> Capture:
        self._pool = self._pool or memory_pool(job.model.device)
        backend = Backend(self.config.backend, self.config.mode)
        return Capture(backend, self._pool, self._memory, self._hands_down)

    def run(self, session: Session) -> None:
        """Bring a prefilled session to its end, or as far as rounds can be captured; eager rounds go on from there."""
        if self.target() is not session.request.model or not self._busy.acquire(blocking=False):
            return
        try:
            job = job_of(session)
            if isinstance(job, str):
                self._warn(f"This call runs the eager round, not the captured one: {job}.")
                return
            made_for = signature(job)
            if made_for != self._made_for:
                self.release()
                self._made_for = made_for
                self._hands_down = job.verify.attention.packs
            whole = head_job(job)
            if isinstance(whole, str):
                self._warn(f"Of this call the target's forward alone is captured, not the round: {whole}.")
                self._run_forwards(job)
            else:
                self._run_rounds(whole)
        finally:
            self._busy.release()

    def _run_rounds(self, job: HeadJob) -> None:
        """Captured rounds, tier after tier."""
        while not job.rows.finished:
            tier = self._tier(job)
            if tier is None:
                break
            self._run_tier(tier, job)
        self._wanted |= self._missed

    def _run_forwards(self, job: Job) -> None:
        """Eager rounds around captured forwards."""
        while not job.rows.finished:
            key, forward = self._forward(job)
            if forward is None:
                break
            with forward.stand_in(job) as stand_in:
                while not job.rows.finished and stand_in.failure is None and forward.fits(stand_in.longest):
                    one_round(stand_in.session)
            if stand_in.failure is not None:
                reason = _message(stand_in.failure)
                self._warn(f"This call runs the eager round, not the captured one: it failed ({reason}).")
                self._forwards[key] = None

    def _forward(self, job: Job) -> tuple[tuple[Any, ...], Forward | None]:
        """The forward that the call goes on with, loaded, and what it is kept under; None if there is none."""
        cache, batch = job.cache, len(job.rows)
        nodes, slots = filled_up(job.config.resolve_nodes(batch, job.rows.device.type)), self.config.first_tier
        while cache.longest + nodes > slots:
            slots *= 2
        key = (batch, slots, nodes, job.kinds_of_positions, *job.kept)
        if key not in self._forwards:
            self._progress(f"hf_dart: preparing forwards of {nodes} nodes for {batch} row(s) of up to {slots} tokens")
            self._forwards[key] = self._made_forward(job, slots, nodes)
        forward = self._forwards[key] = self._forwards.pop(key)
        _drop_first(self._forwards)
        if forward is not None:
            forward.load(job)
        return key, forward

    def _made_forward(self, job: Job, slots: int, nodes: int) -> Forward | None:
        try:
            forward = self._made(lambda: Forward(job, slots, nodes, self._capture(job)))
            forward.load(job)
            error, allowed = forward.differs(job)
        except Exception as failure:
            reason, short = f"it could not be made ({_message(failure)})", isinstance(failure, torch.OutOfMemoryError)
        else:
            if error <= allowed:
                return forward
            reason, short = _differs(job, error, allowed), False
        if not short and self._goes_without(reason):
            return self._made_forward(job, slots, nodes)
        self._warn(f"This call runs the eager round, not the captured one: {reason}.")
        return None

    def _run_tier(self, tier: Tier, job: HeadJob) -> None:
        """Captured rounds in one tier. One that fails is not used again; the session goes on without it."""
        session, is_cuda = job.session, job.session.seen.features.is_cuda
        lag = self.config.lag if self.config.lag is not None else int(is_cuda)
        lengths, leaves = job.cache.lengths.tolist(), self._leaves(tier, job)
        job.cache.release()  # what the tier holds now need not be held twice
        try:
            with session.stats.phase("round"):
                failure = run(tier, session, lengths, lag, leaves)
        finally:
            if job.returns_cache or not job.rows.finished:
                tier.unload(job)
        if failure is not None:
            self._warn(f"This call runs the eager round, not the captured one: it failed ({_message(failure)}).")
            self._tiers = {key: None if kept is tier else kept for key, kept in self._tiers.items()}

    def _tier(self, job: HeadJob) -> Tier | None:
        """The tier that the session goes on in, loaded; None if there is none."""
        rooms = zip(job.cache.lengths.tolist(), job.rows.rooms, strict=True)
        shape = self._shape(job, [(length, room) for length, room in rooms if room > 0])
        key = _key(shape, job)
        made = self._tiers[key] if key in self._tiers else self._make(shape, job)
        if isinstance(made, Tier):
            made = _loaded(made, job)
        if isinstance(made, _Refused):
            if made.computes_otherwise and self._goes_without(made.reason):
                return self._tier(job)
            self._warn(f"This call runs the eager round, not the captured one: {made.reason}.")
            if made.passing:
                return None
        self._tiers.pop(key, None)
        tier = self._tiers[key] = made if isinstance(made, Tier) else None  # the one used last stands last
        _drop_first(self._tiers)
        return tier

    def _goes_without(self, reason: str) -> bool:
        """Go on without arguments for attention, which the target may not hand down; False if that was done before."""
        if self._hands_down:
            self._progress(f"hf_dart: rows of a batch do not share their nodes, nor layers their masks: {reason}")
            self._hands_down, self._pool = False, None
            return True
        return False

    def _leaves(self, tier: Tier, job: HeadJob) -> Callable[[list[tuple[int, int]]], bool]:
        """Is it time to leave a tier, as rows have ended and fewer will do? As `loop.run` asks it, round by round."""
        looked_at = 0

        def leaves(running: list[tuple[int, int]]) -> bool:
            nonlocal looked_at
            if len(running) == looked_at or max(room for _, room in running) < _WORTH_A_MOVE:
                return False
            fewer_will_do = self._shape(job, running).batch < tier.shape.batch
            if not fewer_will_do:  # else it is asked again until rounds that were launched before are read
                looked_at = len(running)
            return fewer_will_do

        return leaves

    def _shape(self, job: HeadJob, running: list[tuple[int, int]]) -> Shape:
        """Of the rounds that a call goes on with.

        For as few rows as will do; but what has to be made first, and would only be of use to the end of the text, is
        made in a later call that wants it too.

        Args:
            running: committed tokens of the rows that run, and how many more they may emit.
        """
        # Nodes of several rows as one row of tokens are not what modules with running states take.
        shares = self._hands_down and not isinstance(job.cache, HybridCache)
        shapes = shapes_of(job, running, self.config.first_tier, self.config.share if shares else 1)
        possible = [shape for shape in shapes if self._tiers.get(_key(shape, job), True) is not None]
        made = [shape for shape in possible if _key(shape, job) in self._tiers]
        if not made or possible[0] in self._wanted:
            return (possible or shapes)[0]
        if possible[0] != made[0]:
            self._missed.add(possible[0])
        return made[0]

    def _make(self, shape: Shape, job: HeadJob) -> Tier | _Refused:
        """A tier, or why there is none."""
        nodes = f"{shape.bucket} nodes" if shape.budget is None else f"{shape.budget} nodes in all"
        self._progress(f"hf_dart: preparing rounds of {nodes} for {shape.batch} row(s) of up to {shape.slots} tokens")
        try:
            tier = self._made(lambda: Tier(shape, job, self._capture(job)))
            loaded = _loaded(tier, job)
            if isinstance(loaded, _Refused):
                return loaded
            for error, allowed in tier.differs(job):
                if not error <= allowed:
                    return _Refused(_differs(job, error, allowed), computes_otherwise=True)
        except Exception as failure:
            passing = isinstance(failure, torch.OutOfMemoryError)
            return _Refused(f"it could not be made ({_message(failure)})", not passing, passing)
        return tier

    def _warn(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            warnings.warn(sentence, stacklevel=6)


def _key(shape: Shape, job: HeadJob) -> tuple[Any, ...]:
    """Calls of one target and head for which this is the same go into one tier."""
    features = job.session.seen.features
    return shape, features.shape[-1], features.dtype, job.kinds_of_positions, *job.kept


def _loaded(tier: Tier, job: HeadJob) -> Tier | _Refused:
    """It, with what the call has come to; or why that could not be, which says nothing of the target."""
    try:
        tier.load(job)
    except Exception as failure:
        return _Refused(f"it could not be loaded ({_message(failure)})", passing=True)
    return tier


def _drop_first(kept: dict[tuple[Any, ...], Any]) -> None:
    """Keep the last ones."""
    if len(kept) > _KEPT:
        while len(kept) > _KEPT:
            del kept[next(iter(kept))]
        gc.collect()


def _differs(job: Job, error: float, allowed: float) -> str:
    return (
        f"{type(job.model).__name__} computes something else on fixed shapes (logits differ by {error:.2g}, "
        f"allowed {allowed:.2g})"
    )


def _message(failure: Exception) -> str:
    """The beginning of an error; those of compilers name what went wrong in the second line."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return f"{type(failure).__name__}: {' '.join(lines[:2]) or 'no message'}"[:300]
