"""Compiled drafters, and what they have captured."""

from __future__ import annotations

from typing import Any

import torch

import hf_dart
from hf_dart.engine.engine import Engine
from support.scripts import experiment

SIMULATED = experiment("simulated")


def counting(tau: float) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """A target that counts, a head that does, and two rows to go on with: the first one soon comes to 130."""
    target = SIMULATED.build_target("tiny", torch.float32, torch.device("cpu"))
    ids = torch.stack([torch.arange(8) + 110, torch.arange(8) + 10])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return target, SIMULATED.SimulatedHead.from_target(target, draft_length=7).aim(tau), inputs


def at_two_speeds() -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """As `counting`, but the target goes on by two after tokens below 60: the second row is slow up to there."""
    target, head, inputs = counting(8.0)
    with torch.no_grad():
        target.lm_head.weight[2:62] = target.get_input_embeddings().weight[:60]
    return target, head, inputs


def engine(target: Any, drafter: Any, **options: Any) -> Engine:
    """Rounds on fixed shapes, uncaptured, in small tiers; the caller's options come first."""
    return hf_dart.compile(target, drafter, **{"backend": None, "first_tier": 16, **options})
