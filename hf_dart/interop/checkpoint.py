"""Files of other projects' checkpoints, read strictly: JSON, safetensors and pickles of plain tensors.

What a file says is compared with what is wanted before any tensor is read, so that a hostile file costs little. No
code of a checkpoint is run: of a `pytorch_model.bin`, a pickle that could run some, every name that it calls is looked
at first, and only what tensors are made of is let through to `torch.load(..., weights_only=True)`.
"""

from __future__ import annotations

import json
import pickletools
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_LARGEST_JSON = 64 * 1024**2
_LARGEST_PICKLE = 16 * 1024**2  # what names the tensors; their numbers lie beside it
_FLOATS = ("F64", "F32", "F16", "BF16")
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
HARMLESS = (
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "initializer_range", "model_type", "pad_token_id", "tie_word_embeddings", "torch_dtype", "transformers_version",
    "use_cache",
)  # fmt: skip
"""Fields of any transformers model that have no bearing on the forward pass of a drafter that is not trained."""
# All that a pickle of tensors has to call.
_CALLED = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(f"torch {kind}Storage" for kind in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char",
                                          "Byte", "Bool")),
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, of which only the header has been read.

    Attributes:
        shape: its sizes.
        dtype: as safetensors calls it, such as "BF16".
        read: gives it, on the CPU.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


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
        files: of safetensors, or a pickle of tensors; no two hold the same one.
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
        found = {name: tensor for name, tensor in _headers(files, path, stack).items() if name not in ignored}
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
            return {name: tensor.read() for name, tensor in found.items()}
        except (SafetensorError, OSError, RuntimeError) as error:
            raise _damaged(path, error) from error


def weight_shapes(files: Iterable[str | Path], path: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of all tensors of a checkpoint, from the headers of its files.

    Args:
        files: of safetensors, or a pickle of tensors.
        path: of the checkpoint, for messages.

    Raises:
        ValueError: a file is damaged.
    """
    with ExitStack() as stack:
        return {name: tensor.shape for name, tensor in _headers(files, path, stack).items()}


def _headers(files: Iterable[str | Path], path: str, stack: ExitStack) -> dict[str, StoredTensor]:
    """The tensors of all files, which `stack` closes."""
    found: dict[str, StoredTensor] = {}
    for file in files:
        here = _pickled(Path(file), path) if str(file).endswith(".bin") else _in_safetensors(file, path, stack)
        if twice := found.keys() & here.keys():
            raise ValueError(f"The weights in {path} hold {min(twice)} twice; fetch them again.")
        found |= here
    return found


def _in_safetensors(file: str | Path, path: str, stack: ExitStack) -> dict[str, StoredTensor]:
    try:
        opened = stack.enter_context(safe_open(file, framework="pt"))
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {
            name: StoredTensor(tuple(part.get_shape()), part.get_dtype(), partial(part.__getitem__, ...))
            for name, part in slices.items()
        }
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _pickled(file: Path, path: str) -> dict[str, StoredTensor]:
    """The tensors of a `pytorch_model.bin`, mapped into memory: their numbers are read when they are asked for."""
    remedy = "convert it to safetensors with the code that wrote it, or fetch it again"
    try:
        with ZipFile(file) as archive:
            entries = archive.infolist()
            names = [entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
            # Compressed, a small file could fill the memory.
            if len(names) != 1 or any(entry.compress_type != ZIP_STORED for entry in entries):
                raise ValueError(f"{file.name} in {path} is no archive of tensors as torch.save writes it; {remedy}.")
            if names[0].file_size > _LARGEST_PICKLE:
                raise ValueError(f"{file.name} in {path} names its tensors in {names[0].file_size} bytes; {remedy}.")
            pickle = archive.read(names[0])
        for operation, argument, _ in pickletools.genops(pickle):
            if operation.name == "GLOBAL" and argument in _CALLED:
                continue
            if operation.name in ("GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"):
                raise ValueError(
                    f"{file.name} in {path} calls {str(argument or operation.name)[:80]!r} when it is read, as plain "
                    f"tensors do not; it is not opened, so {remedy}."
                )
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (BadZipFile, OSError, RuntimeError, EOFError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error
    except ValueError as error:
        raise error if str(error).endswith(".") else _damaged(path, error) from error
    except Exception as error:  # pickle's own, whatever they are
        raise _damaged(path, error) from error
    if not isinstance(content, dict) or not all(isinstance(name, str) and _plain(one) for name, one in content.items()):
        raise ValueError(f"{file.name} in {path} holds other things than tensors by their names; {remedy}.")
    return {
        name: StoredTensor(tuple(one.shape), _DTYPES[one.dtype], partial(_copied, one)) for name, one in content.items()
    }


def _copied(tensor: Tensor) -> Tensor:
    """The tensor in memory of its own: that of the file stays mapped."""
    return tensor.detach().clone().contiguous()


def _plain(value: Any) -> bool:
    """Is it a tensor that takes no more memory than its numbers take in the file?"""
    known = type(value) in (Tensor, torch.nn.Parameter) and value.dtype in _DTYPES and value.is_cpu
    return known and value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _damaged(path: str, error: Exception) -> ValueError:
    words = " ".join(str(error).split())[:300]
    return ValueError(f"The weights in {path} are truncated or damaged ({words}); fetch them again.")


def _check(path: str, name: str, tensor: StoredTensor, wanted: tuple[int, ...], dtype: torch.dtype | None) -> None:
    shape, kind = tensor.shape, tensor.dtype
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
        self._content, self.kind, self._asked = content, kind, set[str]()

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
        return Fields(value or {}, f"{self.kind}'s {name}")

    def finish(self, harmless: Collection[str] = ()) -> None:
        """Raise a ValueError if there is a field that nobody asked for and that is not known to be `harmless`."""
        if unknown := self._content.keys() - self._asked - set(harmless):
            raise ValueError(
                f"The config.json of this {self.kind} has the field {min(unknown)}, which this version of hf_dart "
                "does not know; it may change what is computed, so use a newer version or another checkpoint."
            )

    def wrong(self, name: str, value: Any, wanted: str) -> ValueError:
        """What to raise where a field holds `value` and has to be `wanted`."""
        if value is None:
            return ValueError(f"The config.json of this {self.kind} lacks {name}; it has to be {wanted}.")
        shown = json.dumps(value)[:80]
        return ValueError(f"The config.json of this {self.kind} says {name}: {shown}; it has to be {wanted}.")

    def _value(self, name: str, default: Any) -> Any:
        value = self.given(name)
        return default if value is None else value


def place_of(outer: Fields, inner: Fields, name: str) -> Fields:
    """Which of two places a field stands at; both is fine while they agree.

    Raises:
        ValueError: they do not.
    """
    one_of(outer, inner, (name,))
    return inner if name in inner else outer


def one_of(outer: Fields, inner: Fields, names: tuple[str, ...]) -> Any:
    """The one value that these names have at both places; None if they are nowhere.

    Raises:
        ValueError: they have several.
    """
    values = [fields.given(name) for name in names for fields in (outer, inner) if name in fields]
    other = next((value for value in values if value != values[0]), None)
    if other is not None:
        raise ValueError(
            f"The config.json of this {outer.kind} contradicts itself: {' and '.join(names)} are {values[0]!r} at one "
            f"place and {other!r} at another."
        )
    return values[0] if values else None
