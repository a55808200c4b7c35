"""Kinds of drafters and their texts on a card; `hf_dart.drafters.registry.register` fills the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

Rows = dict[str, str]  # of the card's table; empty ones are left out


@dataclass(frozen=True)
class CardTexts:
    """Texts of a card on the Hub about one kind of drafter.

    Attributes:
        called: what it is called, with its article.
        short: what it is called in code, and where nothing else is meant.
        tag: of the card's front matter.
        introduced: as `called`, with a link to the paper.
        rows: what its config says, in words.
        source: the paper in BibTeX.
    """

    called: str
    short: str
    tag: str
    introduced: str
    rows: Callable[[Any], Rows]
    source: str


@dataclass(frozen=True)
class Kind:
    """One kind of drafter on the Hub.

    Attributes:
        config_class: its config, which has a `model_type`.
        class_name: of the drafter.
        module: where users import that class from.
        trained_as: what `hf-dart train --drafter` calls it; None if nothing trains it.
        texts: what its card says.
    """

    config_class: type[PreTrainedConfig]
    class_name: str
    module: str
    trained_as: str | None
    texts: CardTexts


KINDS: dict[str, Kind] = {}
"""Kinds by the `model_type` of their config; a kind is in it once the module of its drafter was imported."""


def kind_of(config: PreTrainedConfig) -> Kind:
    """Return the kind of a drafter, by its config."""
    return KINDS[config.model_type]


def describe_layers(config: PreTrainedConfig, number: int) -> str:
    """Return the decoder layers of a drafter and their widths, in words."""
    layers = "one decoder layer" if number == 1 else f"{number} decoder layers"
    return (
        f"{layers}: hidden {config.hidden_size}, {config.num_attention_heads} query and "
        f"{config.num_key_value_heads} key-value heads of {config.head_dim}, MLP {config.intermediate_size}"
    )


def describe_features(config: PreTrainedConfig) -> str:
    """Return the layers of the target that a drafter reads, in words."""
    return f"layers {', '.join(map(str, config.feature_layers))} of the target's {config.target_num_layers}"


def bibtex(key: str, title: str, year: int, number: str) -> str:
    """Return an entry of arXiv in BibTeX."""
    return f"""```bibtex
@misc{{{key},
  title = {{{title}}},
  year = {{{year}}},
  eprint = {{{number}}},
  archivePrefix = {{arXiv}},
  url = {{https://arxiv.org/abs/{number}}}
}}
```"""
