"""Files of other projects' checkpoints, read strictly: JSON and safetensors, nothing else, and nothing halfway.

What a file says is compared with what is wanted before any tensor is read, so that a hostile file costs little. No
code of a checkpoint is run, and pickled weights are not opened, because they could run some.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_LARGEST_JSON = 64 * 1024**2
_FLOATS = ("F64", "F32", "F16", "BF16")


def read_tensors(
    files: Iterable[str | Path],
    path: str,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    optional: Collection[str] = (),
    ignored: Collection[str] = (),
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> dict[str, Tensor]:
    """The tensors of a checkpoint, on the CPU and in the dtype they were saved in.

    Args:
        files: of safetensors, of which no two hold the same tensor.
        path: of the checkpoint, for messages.
        shapes: name and shape of every tensor that there has to be; a dimension of -1 is any size.
        optional: names out of `shapes` that may be missing.
        ignored: names of others that may be there, and are not read.
        dtypes: of those that are not floating-point.

    Raises:
        ValueError: a tensor is missing, unknown, or of another shape or kind, or a file is damaged.
    """
    dtypes = dtypes or {}
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error
            if twice := found.keys() & slices.keys():
                raise ValueError(f"The weights in {path} hold {min(twice)} twice; fetch them again.")
            found |= slices
        found = {name: tensor for name, tensor in found.items() if name not in ignored}
        if strange := found.keys() - shapes.keys():
            raise ValueError(
                f"The weights in {path} hold {min(strange)}, which a checkpoint of this kind does not have; give one "
                "whose config.json and weights belong together."
            )
        if missing := shapes.keys() - found.keys() - set(optional):
            raise ValueError(
                f"The weights in {path} lack {min(missing)}; fetch them again, together with their config.json."
            )
        for name, tensor in found.items():
            _check(path, name, tensor, shapes[name], dtypes.get(name))
        try:
            return {name: tensor[...] for name, tensor in found.items()}
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error


def weight_shapes(files: Iterable[str | Path], path: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of all tensors of a checkpoint, from the headers of its files.

    Args:
        files: of safetensors.
        path: of the checkpoint, for messages.

    Raises:
        ValueError: a file is damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error
    return shapes


def _damaged(path: str, error: Exception) -> ValueError:
    return ValueError(f"The weights in {path} are truncated or damaged ({error}); fetch them again.")


def _check(path: str, name: str, tensor: Any, wanted: tuple[int, ...], dtype: torch.dtype | None) -> None:
    shape, kind = tuple(tensor.get_shape()), tensor.get_dtype()
    if len(shape) != len(wanted) or any(size not in (-1, given) for size, given in zip(wanted, shape, strict=True)):
        raise ValueError(
            f"{name} in {path} has shape {list(shape)}, where its config.json asks for {list(wanted)}; give files that "
            "belong together."
        )
    fits = kind in _FLOATS if dtype is None else kind == {torch.int64: "I64", torch.bool: "BOOL"}[dtype]
    if not fits:
        raise ValueError(f"{name} in {path} is saved as {kind}, which cannot be used; fetch the original weights.")


def read_json(file: Path) -> dict[str, Any]:
    """The fields of a JSON file of another project.

    Raises:
        ValueError: it is too large, or not one JSON object with every name once.
    """
    if file.stat().st_size > _LARGEST_JSON:
        raise ValueError(f"{file.name} has {file.stat().st_size} bytes; give the file that belongs to the weights.")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise ValueError("it names a field twice")
        return fields

    def refuse(constant: str) -> Any:
        raise ValueError(f"it holds {constant}")

    try:
        content = json.loads(file.read_bytes(), object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} in {file.parent} cannot be read as JSON ({error}); fetch it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} in {file.parent} is no JSON object; fetch it again.")
    return content


class Fields:
    """The fields of a config.json, each of which has to be asked for, or to be known and without effect.

    Args:
        content: of a config.json, as `read_json` gives it.
        kind: what the checkpoint is, for messages.
    """

    def __init__(self, content: dict[str, Any], kind: str) -> None:
        self._content, self._kind, self._asked = content, kind, set[str]()

    def __contains__(self, name: str) -> bool:
        return self.given(name) is not None

    def given(self, name: str) -> Any:
        """What stands there; None where nothing does."""
        self._asked.add(name)
        return self._content.get(name)

    def integer(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """A whole number; as all of these, a `ValueError` if something else stands there."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, value, f"a whole number from {least} to {most}")
        return value

    def integers(self, name: str, least: int, most: int) -> tuple[int, ...]:
        """Different whole numbers, at least one."""
        value = self._value(name, None)
        numbers = value if isinstance(value, list) else []
        right = all(type(number) is int and least <= number <= most for number in numbers)
        if not numbers or not right or len(set(numbers)) < len(numbers):
            raise self.wrong(name, value, f"a list of different whole numbers from {least} to {most}")
        return tuple(numbers)

    def number(self, name: str, default: float | None = None, *, positive: bool = True) -> float:
        """A finite number, above 0 if it has to be."""
        value = self._value(name, default)
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and -1e308 < value < 1e308
        if not right or (positive and value <= 0):
            raise self.wrong(name, value, "a number above 0" if positive else "a number")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def choice(self, name: str, choices: Collection[Any], default: Any = None) -> Any:
        """One of the `choices`, of the same type."""
        value = self._value(name, default)
        if not any(type(value) is type(one) and value == one for one in choices):
            raise self.wrong(name, value, " or ".join(json.dumps(one) for one in choices))
        return value

    def part(self, name: str) -> Fields:
        """The fields of an object inside; none if it is not there."""
        value = self.given(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return Fields(value or {}, f"{self._kind}'s {name}")

    def finish(self, harmless: Collection[str] = ()) -> None:
        """Raise a ValueError if there is a field that nobody asked for and that is not known to be `harmless`."""
        if unknown := self._content.keys() - self._asked - set(harmless):
            raise ValueError(
                f"The config.json of this {self._kind} has the field {min(unknown)}, which this version of hf_dart "
                "does not know; it may change what is computed, so use a newer version or another checkpoint."
            )

    def wrong(self, name: str, value: Any, wanted: str) -> ValueError:
        """What to raise where a field holds `value` and has to be `wanted`."""
        if value is None:
            return ValueError(f"The config.json of this {self._kind} lacks {name}; it has to be {wanted}.")
        shown = json.dumps(value)[:80]
        return ValueError(f"The config.json of this {self._kind} says {name}: {shown}; it has to be {wanted}.")

    def _value(self, name: str, default: Any) -> Any:
        value = self.given(name)
        return default if value is None else value
