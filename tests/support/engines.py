"""Compiled drafters, and what they have captured."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

import hf_dart
from hf_dart.engine.engine import Engine
from hf_dart.engine.graphs import EngineConfig
from support.scripts import experiment
from support.tiny import tiny_head, tiny_target

SIMULATED = experiment("simulated")


def counting(tau: float) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """A target that counts, a head that does, and two rows to go on with: the first one soon comes to 130."""
    target = SIMULATED.build_target("tiny", torch.float32, torch.device("cpu"))
    ids = torch.stack([torch.arange(8) + 110, torch.arange(8) + 10])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return target, SIMULATED.SimulatedHead.from_target(target, draft_length=7).aim(tau), inputs


def engine(target: Any, drafter: Any, **options: Any) -> Engine:
    """Parts on fixed shapes, uncaptured, in small tiers; the caller's options come first."""
    return hf_dart.compile(target, drafter, **{"backend": None, "first_tier": 16, **options})


def compiled_pair(family: str, **options: Any) -> tuple[Any, Any, Engine]:
    """A tiny target, a random head, and their engine."""
    target = tiny_target(family)
    head = tiny_head(target)
    return target, head, engine(target, head, **options)


class Everywhere:
    """Stands in as the engine of every drafter: `calls` run on fixed shapes, with an engine for each target."""

    def __init__(self, first_tier: int = 16) -> None:
        self._config = EngineConfig(backend=None, first_tier=first_tier)
        self._made: WeakKeyDictionary[Any, Engine] = WeakKeyDictionary()
        self.calls = 0

    def run(self, session: Any) -> None:
        """See `Engine.run`."""
        target, drafter = session.request.model, session.request.drafter
        made = self._made.get(drafter)
        if made is None or made.target() is not target:
            made = self._made[drafter] = Engine(target, self._config, lambda told: None)
        made.run(session)
        self.calls += any(made.tiers)
