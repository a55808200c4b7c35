"""`Fields`: a config.json of another project, of which every field has to be known."""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Collection
from typing import Any

from hf_dart.hub.download import NOTES

MANY = 2**31 - 1  # largest whole number of a field that the target or the weights bound
HARMLESS = {
    *NOTES, "attention_dropout", "auto_map", "bos_token_id", "eos_token_id", "initializer_range", "pad_token_id",
}  # fmt: skip
"""Fields of any transformers model that have no bearing on the forward pass of a drafter that is not trained."""
_NOT_READ = {
    "xpress": "an XPress drafter, which refines whole blocks of DFlash's",  # arXiv 2608.02438
    "museglimmerassistant": "an assistant of Muse Glimmer, a DFlash drafter in a layout of its own",
    "dflashlaguna": "a DFlash drafter with layers of Laguna",
    # Speculators' class has that name, too; its files say what they are.
    "['peagledraftmodel'] none": "a P-EAGLE head of SpecForge, whose config.json names no mask token",
    "gemma4dspark": "a DFlash or DSpark drafter with layers of Gemma 4",
    "gemma4eagle3": "an EAGLE-3 head with layers of Gemma 4",
    "eagle3deepseek": "an EAGLE-3 head with latent attention",
}
"""What config.json files call drafters that no reader knows, and what these are."""


def refuse_by_name(content: dict[str, Any]) -> None:
    """Raise a `ValueError` if a config.json is that of a drafter that is known and not read."""
    names = " ".join([*content, str(content.get("architectures")), str(content.get("speculators_model_type"))]).lower()
    if found := next((what for name, what in _NOT_READ.items() if name in names), None):
        raise ValueError(f"This is {found}, and hf_dart does not read these; give another drafter of this target.")


class Fields:
    """The fields of a config.json, each of which has to be asked for, or to be known and without effect.

    Fields in `beside` may be in `content` too if all say the same; `kind` is what the checkpoint is, for messages.
    """

    def __init__(self, content: dict[str, Any], kind: str, *beside: dict[str, Any]) -> None:
        self._content, self.kind, self._places, self._asked = content, kind, (content, *beside), set[str]()

    def __contains__(self, name: str) -> bool:
        return self.given(name) is not None

    def given(self, *names: str) -> Any:
        """Return the one value that these names have, None if they are missing; raise if they have several."""
        self._asked.update(names)
        found = [place.get(name) for name in names for place in self._places]
        values = [value for value in found if value is not None]
        other = next((value for value in values if value != values[0]), None)
        if other is not None:
            raise ValueError(
                f"The config.json of this {self.kind} contradicts itself: {' and '.join(names)} are {values[0]!r} at "
                f"one place and {other!r} at another."
            )
        return values[0] if values else None

    def named(self, *names: str) -> str:
        """Return which of these names of one thing there is, else the first; raise as `given` does."""
        self.given(*names)
        return next((name for name in names if name in self), names[0])

    def integer(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """Return a whole number; as all of these, raise a `ValueError` for anything else."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, value, f"a whole number from {least} to {most}")
        return value

    def integers(self, name: str, least: int, most: int) -> tuple[int, ...]:
        """Return a list of different whole numbers, at least one."""
        value = self._value(name, None)
        numbers = value if isinstance(value, list) else []
        right = all(type(number) is int and least <= number <= most for number in numbers)
        if not numbers or not right or len(set(numbers)) < len(numbers):
            raise self.wrong(name, value, f"a list of different whole numbers from {least} to {most}")
        return tuple(numbers)

    def number(self, name: str, default: float | None = None, *, positive: bool = True) -> float:
        """Return a finite number, above 0 if it has to be."""
        value = self._value(name, default)
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and -1e308 < value < 1e308
        if not right or (positive and value <= 0):
            raise self.wrong(name, value, "a number above 0" if positive else "a number")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return True or false."""
        return bool(self.choice(name, (True, False), default))

    def choice(self, name: str, choices: Collection[Any], default: Any = None) -> Any:
        """Return one of the `choices`, of the same type."""
        value = self._value(name, default)
        if not any(type(value) is type(one) and value == one for one in choices):
            raise self.wrong(name, value, " or ".join(json.dumps(one) for one in choices))
        return value

    def part(self, *names: str, outer: Collection[str] = ()) -> Fields:
        """Return the fields of the objects inside that have these names, as one; `outer` ones may stand next to it."""
        parts = {name: self.given(name) for name in names if name in self}
        for name, value in parts.items():
            if not isinstance(value, dict):
                raise self.wrong(name, value, "an object")
        beside = {name: self.given(name) for name in outer}
        return Fields(dict(ChainMap(*parts.values())), f"{self.kind}'s {[*parts, *names][0]}", beside, *parts.values())

    def finish(self, harmless: Collection[str] = ()) -> None:
        """Raise a ValueError if there is a field that nobody asked for and that is not known to be `harmless`."""
        if unknown := self._content.keys() - self._asked - set(harmless):
            raise ValueError(
                f"The config.json of this {self.kind} has the field {min(unknown)}, which this version of hf_dart "
                "does not know; it may change what is computed, so use a newer version or another checkpoint."
            )

    def wrong(self, name: str, value: Any, wanted: str) -> ValueError:
        """Return the error to raise where a field holds `value` and has to be `wanted`."""
        if value is None:
            return ValueError(f"The config.json of this {self.kind} lacks {name}; it has to be {wanted}.")
        shown = json.dumps(value)[:80]
        return ValueError(f"The config.json of this {self.kind} says {name}: {shown}; it has to be {wanted}.")

    def _value(self, name: str, default: Any) -> Any:
        value = self.given(name)
        return default if value is None else value
