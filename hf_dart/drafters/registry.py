"""The kinds of drafters: one line, `@register(...)` on the class, makes a kind known everywhere.

From it come what `load_drafter` recognises, what `hf-dart train --drafter` takes, what a card on the Hub says, and the
class as a name of `hf_dart`. The kinds of this package are found by their folders: `hf_dart/drafters/NAME/drafter.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeVar

from transformers import PreTrainedConfig

from hf_dart.hub.kinds import KINDS, CardTexts, Kind, Reads

Class = TypeVar("Class", bound=type[Any])


def register(
    name: str,
    *,
    config: type[PreTrainedConfig] | None = None,
    trainer: str | None = None,
    variants: dict[str, str] | None = None,
    card: CardTexts | None = None,
    reads: Reads | None = None,
) -> Callable[[Class], Class]:
    """Make a class of drafters known, as a decorator: to loading, `hf-dart train`, cards, and in `hf_dart`.

    Args:
        name: of the kind, such as "eagle".
        config: the class of its config, with a `model_type` of its own; it becomes the class's `config_class`.
        trainer: "module:class" of what `hf-dart train --drafter NAME` trains it with (a `DrafterTrainer`).
        variants: other names for `--drafter`, and the trainer of each.
        card: what its card on the Hub says.
        reads: what a config.json describes, such as "an EAGLE-3 head in the original format", if it is that of a
            checkpoint in another format that the class reads; else None. Its second argument gives the names of the
            tensors, for which their headers are fetched, where a config.json does not tell.
    """

    def add(drafter: Class) -> Class:
        trainers = {**({} if trainer is None else {name: trainer}), **(variants or {})}
        KINDS[name] = Kind(name, drafter, config, trainers, card)
        if config is not None:
            drafter.config_class = config
        if reads is not None:
            drafter.reads = staticmethod(reads)
        return drafter

    return add


def registered() -> dict[str, Kind]:
    """Return all kinds by their names; those of this package are imported first."""
    for folder in iter_modules([str(Path(__file__).parent)]):
        if folder.ispkg:
            import_module(f"{__package__}.{folder.name}.drafter")
    return dict(KINDS)


def trainers() -> dict[str, tuple[Any, str]]:
    """Return the choices of `hf-dart train --drafter`: the class of the drafter, and "module:class" of its trainer."""
    found = registered().values()
    return {name: (kind.drafter, trainer) for kind in found for name, trainer in kind.trainers.items()}
