"""A session that the engine can go on with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_dart.cache.hybrid import HybridCache
from hf_dart.cache.ragged import RaggedCache
from hf_dart.decoding.rows import Rows
from hf_dart.decoding.session import Session
from hf_dart.drafters.base import Drafter
from hf_dart.drafters.dart.drafter import DartHead
from hf_dart.models.verify import Verifier
from hf_dart.trees.config import TreeConfig


@dataclass(frozen=True)
class Job:
    """A session whose target can run on fixed shapes.

    Attributes:
        session: prefilled, after some eager rounds or none.
        cache: the session's, of the kind whose entries can be handed over.
        verify: the session's, likewise.
        head: its drafter, if that is a head that drafts in one pass where the target is.
    """

    session: Session
    cache: RaggedCache | HybridCache
    verify: Verifier
    head: DartHead | None

    @property
    def model(self) -> PreTrainedModel:
        """The target."""
        return self.session.request.model

    @property
    def drafter(self) -> Drafter[Any]:
        """What drafts."""
        return self.session.request.drafter

    @property
    def config(self) -> TreeConfig:
        """How trees grow."""
        return self.session.request.tree_config

    @property
    def rows(self) -> Rows:
        """The text of each row."""
        return self.session.rows

    @property
    def returns_cache(self) -> bool:
        """Will anybody look at the cache after the call?"""
        return self.session.request.returns_cache

    @property
    def kinds_of_positions(self) -> tuple[Any, ...]:
        """Are positions shifted (`Verifier.shift`), how many kinds of them, and of which dtype?"""
        shift = self.verify.shift
        return () if shift is None else (*shift.shape[:-1], shift.dtype)

    @property
    def kept(self) -> tuple[Any, ...]:
        """The shapes of what the target keeps, but for the number of rows and their lengths."""
        states = self.cache.states.committed if isinstance(self.cache, HybridCache) else {}
        shapes = [(slot, state.shape[1:], state.dtype, state.device) for slot, state in states.items()]
        return *self.cache.store.specs, *shapes

    @property
    def draft_state(self) -> Any:
        """What the drafter has read, as its `begin` returned it."""
        return self.session.drafter_runner.drafter_state.state


@dataclass(frozen=True)
class HeadJob(Job):
    """One whose whole rounds can be captured: a head's, that ask the host for nothing."""

    head: DartHead
