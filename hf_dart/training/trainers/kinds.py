"""Which trainer trains which kind of drafter: what `hf-dart train --drafter NAME` looks up."""

from __future__ import annotations

from importlib import import_module

from hf_dart.drafters.registry import trainers
from hf_dart.training.trainers.dart import DartTrainer


def trainer_of(name: str) -> type[DartTrainer]:
    """The trainer of a kind of drafter, as its drafter was registered (`hf_dart.drafters.registry.register`).

    Raises:
        ValueError: there is no such kind.
    """
    known = trainers()
    if name not in known:
        raise ValueError(f"drafter is {name!r}; give one of {', '.join(known)}.")
    module, _, trainer = known[name][1].partition(":")
    return getattr(import_module(module), trainer)
