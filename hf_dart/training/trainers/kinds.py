"""Which trainer trains which kind of drafter: what `hf-dart train --drafter NAME` looks up."""

from __future__ import annotations

from hf_dart.training.trainers.dart import DartTrainer
from hf_dart.training.trainers.diffusion import DiffusionTrainer
from hf_dart.training.trainers.eagle import EagleTrainer
from hf_dart.training.trainers.edit import EditTrainer

TRAINERS: dict[str, type[DartTrainer]] = {
    "dart": DartTrainer,
    "edit": EditTrainer,
    "diffusion": DiffusionTrainer,
    "eagle": EagleTrainer,
}
"""Trainers by the name of their kind; each says what it trains and by which options."""


def trainer_of(name: str) -> type[DartTrainer]:
    """The trainer of a kind of drafter.

    Raises:
        ValueError: there is no such kind.
    """
    if name not in TRAINERS:
        raise ValueError(f"drafter is {name!r}; give one of {', '.join(TRAINERS)}.")
    return TRAINERS[name]
