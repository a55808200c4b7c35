"""What a config's fields may hold: their types, and the ranges of what the configs of drafters have in common."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

MAX_DRAFT_LENGTH = 31
"""Longest draft: with its bonus token a round commits at most 32 tokens, the bound on the noise queue."""

_SIZES = (
    "hidden_size", "embedding_size", "feature_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "target_num_layers",
)  # fmt: skip


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) < 2**31


def _number(value: Any) -> bool:
    known = isinstance(value, Real) and not isinstance(value, bool)
    return known and -1e308 < value < 1e308  # a whole number may be too large for a float


def _list_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(map(kind, value))


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_whole, "a whole number below 2^31"),
    "float": (_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "text"),
    "list[int] | tuple[int, ...]": (_list_of(_whole), "a list of whole numbers"),
    "list[float] | tuple[float, ...]": (_list_of(_number), "a list of numbers"),
    "dict[str, Any]": (lambda value: isinstance(value, dict) and all(isinstance(name, str) for name in value),
                       "named fields"),
}  # fmt: skip
"""By annotation: is a value of that type, and what the type is called."""


def check_types(config: Any, kind: type, prefix: str = "") -> None:
    """Raise a `ValueError` that names the first field which holds something else than its annotation says.

    Args:
        config: an instance.
        kind: its class, or the base class of it whose own fields are looked at.
        prefix: of fields, in the message.
    """
    for name, annotation in kind.__annotations__.items():
        wanted = annotation.removesuffix(" | None")
        if wanted not in _KINDS:  # `TreeConfig.verify_costs` has a check of its own
            continue
        value = getattr(config, name)
        if value is None and wanted != annotation:
            continue
        fits, called = _KINDS[wanted]
        if not fits(value):
            none = "" if wanted == annotation else " or None"
            raise ValueError(f"{prefix}{name} is {value!r:.100}; give {called}{none}.")


def check_shape(config: Any) -> None:
    """Raise a `ValueError` if what the configs of drafters have in common is out of range; `feature_layers` ascend."""
    for name in _SIZES:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; give 1 or more.")
    if config.head_dim % 2:
        raise ValueError(f"head_dim is {config.head_dim}; give an even number, as rotary positions turn pairs.")
    for name in ("rms_norm_eps", "rope_theta"):
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} is {getattr(config, name)}; give a number above 0.")
    if config.initializer_range < 0:
        raise ValueError(f"initializer_range is {config.initializer_range}; give 0 or more.")
    if not 1 <= config.draft_length <= MAX_DRAFT_LENGTH:
        raise ValueError(f"draft_length is {config.draft_length}; give 1 to {MAX_DRAFT_LENGTH}.")
    layers, last = config.feature_layers, config.target_num_layers
    if layers and not 0 <= layers[0] <= layers[-1] <= last:
        raise ValueError(
            f"feature_layers {layers} do not lie in 0..{last}, the hidden_states of the target; count from 0 (the "
            "embeddings) and use no negative index."
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads ({config.num_attention_heads}) must be a multiple of num_key_value_heads "
            f"({config.num_key_value_heads})."
        )
