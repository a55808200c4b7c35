"""Kinds of drafters and their texts on a card; `hf_dart.drafters.registry.register` fills the table."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

Names = Callable[[], Collection[str]]
Reads = Callable[[dict[str, Any], Names], str | None]


@dataclass(frozen=True)
class CardTexts:
    """Texts of a card on the Hub about one kind of drafter."""

    called: str  # with its article
    short: str  # what it is called in code, and where nothing else is meant
    tag: str  # of the card's front matter
    introduced: str  # as `called`, with a link to the paper
    paper: tuple[str, str] | None = None  # its number on arXiv and its title


@dataclass(frozen=True)
class Kind:
    """One kind of drafter, as `hf_dart.drafters.registry.register` was told of it."""

    name: str
    drafter: Any  # its class
    config_class: type[PreTrainedConfig] | None
    trainers: dict[str, str]  # "module:class" by the name that `hf-dart train --drafter` takes
    texts: CardTexts | None

    @property
    def called(self) -> str:
        """What one is called, with its article."""
        return f"a {self.drafter.__name__}" if self.texts is None else self.texts.called

    @property
    def module(self) -> str:
        """The module where users import its class from."""
        return "hf_dart" if self.drafter.__module__.startswith("hf_dart.") else self.drafter.__module__

    @property
    def trained_as(self) -> str | None:
        """The name that `hf-dart train --drafter` takes; None if nothing trains it."""
        return self.name if self.name in self.trainers else None

    def recognises(self, content: dict[str, Any], names: Names) -> str | None:
        """Return a description of a checkpoint that such a drafter reads (`Drafter.reads`), in whatever format."""
        own = self.config_class is not None and content.get("model_type") == self.config_class.model_type
        return self.called if own else self.drafter.reads(content, names)


KINDS: dict[str, Kind] = {}  # kinds by their names; a kind is in it once the module of its drafter was imported


def kind_of(model_type: Any) -> Kind | None:
    """Return the kind of drafter whose config has that `model_type`; None if there is none."""
    known = {kind.config_class.model_type: kind for kind in KINDS.values() if kind.config_class is not None}
    return known.get(str(model_type))  # a damaged file has anything
