"""Strict readers of checkpoints: JSON, safetensors and pickles of plain tensors.

What a file says is compared with what is wanted before any tensor is read. No code of a checkpoint is run:
`torch.load(..., weights_only=True)` calls nothing that a pickle names but what tensors are made of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_dart.errors import sentence

_LARGEST_JSON = 64 * 1024**2
_LARGEST_PICKLE = 16 * 1024**2  # the pickle that names the tensors, without their numbers
_FLOATS = ("F64", "F32", "F16", "BF16")
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, of which only the header has been read."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it, such as "BF16"
    read: Callable[[], Tensor]


def read_tensors(
    files: Iterable[str | Path],
    path: str,  # as for `headers`
    shapes: Mapping[str, tuple[int, ...]],  # of every tensor that there has to be
    *,
    optional: Collection[str] = (),  # names out of `shapes` that may be missing
    ignored: Collection[str] = (),  # names of others that may be there, and are not read
    dtypes: Mapping[str, torch.dtype] | None = None,  # of those that are not floating-point
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, on the CPU and in the dtype they were saved in.

    Refused are missing, unknown and damaged tensors, and those of another shape or kind.
    """
    dtypes = dtypes or {}
    found = {name: tensor for name, tensor in headers(files, path).items() if name not in ignored}
    if strange := found.keys() - shapes.keys():
        raise ValueError(f"The weights in {path} hold {min(strange)} as well; give files that belong together.")
    if missing := shapes.keys() - found.keys() - set(optional):
        raise ValueError(f"The weights in {path} lack {min(missing)}; fetch them again, with their config.json.")
    for name, tensor in found.items():
        if tensor.shape != tuple(shapes[name]):
            has, asked = list(tensor.shape), list(shapes[name])
            raise ValueError(f"{name} in {path} has shape {has}, and in config.json {asked}; give files that fit.")
        if tensor.dtype not in ([_DTYPES[dtypes[name]]] if name in dtypes else _FLOATS):
            raise ValueError(f"{name} in {path} is saved as {tensor.dtype}; fetch the weights in floating point.")
    try:
        return {name: tensor.read() for name, tensor in found.items()}
    except (SafetensorError, OSError, RuntimeError) as error:
        raise _damaged(path, error) from error


def weight_shapes(files: Iterable[str | Path], path: str) -> dict[str, tuple[int, ...]]:
    """Return name and shape of all tensors of a checkpoint, as `headers` does."""
    return {name: tensor.shape for name, tensor in headers(files, path).items()}


def headers(files: Iterable[str | Path], path: str) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name, from the headers of its files; messages name its `path`.

    Damaged files are refused, and two that hold the same tensor.
    """
    found: dict[str, StoredTensor] = {}
    for file in files:
        here = _pickled(Path(file), path) if str(file).endswith(".bin") else _in_safetensors(file, path)
        if twice := found.keys() & here.keys():
            raise ValueError(f"The weights in {path} hold {min(twice)} twice; fetch them again.")
        found |= here
    return found


def _in_safetensors(file: str | Path, path: str) -> dict[str, StoredTensor]:
    def read(name: str) -> Tensor:
        with safe_open(file, framework="pt") as again:
            return again.get_tensor(name)

    found = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                found[name] = StoredTensor(tuple(part.get_shape()), part.get_dtype(), partial(read, name))
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error
    return found


def _pickled(file: Path, path: str) -> dict[str, StoredTensor]:
    """Map the tensors of a `pytorch_model.bin` into memory: their numbers are read when they are asked for."""
    try:
        with ZipFile(file) as archive:
            entries = archive.infolist()
        # A small compressed file could fill the memory, and so could what names the tensors.
        named = sum(entry.file_size for entry in entries if entry.filename.endswith("data.pkl"))
        if named > _LARGEST_PICKLE or any(entry.compress_type != ZIP_STORED for entry in entries):
            raise ValueError("compressed, or too large")
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        if not all(isinstance(name, str) and _plain(one) for name, one in content.items()):
            raise ValueError("more than tensors")
    except Exception as error:  # pickles raise errors of many kinds, some of which advise to trust the file
        raise ValueError(
            f"{file.name} in {path} is damaged or holds more than tensors by their names, as torch.save writes them; "
            "convert it to safetensors with the code that wrote it, or fetch it again."
        ) from error
    found = {}
    for name, one in content.items():
        # What is read has memory of its own: that of the file stays mapped.
        read = partial(torch.clone, one.detach(), memory_format=torch.contiguous_format)
        found[name] = StoredTensor(tuple(one.shape), _DTYPES[one.dtype], read)
    return found


def _plain(value: Any) -> bool:
    """Return True for a tensor that takes no more memory than its numbers take in the file."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return False
    fits = value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    return fits and value.is_cpu and value.dtype in _DTYPES


def _damaged(path: str, error: Exception) -> ValueError:
    return ValueError(f"The weights in {path} are truncated or damaged ({sentence(error)}); fetch them again.")


def read_json(file: Path) -> dict[str, Any]:
    """Return the fields of a JSON file of another project, which has to hold one object with every name once."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise ValueError("it names a field twice")
        return fields

    def refuse(constant: str) -> Any:
        raise ValueError(f"it holds {constant}")

    try:
        if file.stat().st_size > _LARGEST_JSON:
            raise ValueError(f"it has {file.stat().st_size} bytes")
        content = json.loads(file.read_bytes(), object_pairs_hook=once, parse_constant=refuse)
        if not isinstance(content, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as JSON ({sentence(error)}); give a whole one.") from error
    return content


@contextmanager
def refused(what: str, remedy: str) -> Iterator[None]:
    """Say in one sentence why transformers did not load something; the global generator is not moved."""
    try:
        # transformers draws weights that a damaged checkpoint lacks.
        with torch.random.fork_rng(devices=[]):
            yield
    except (ImportError, torch.OutOfMemoryError):  # which say themselves what to do
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is None:  # of transformers, likewise; others are the system's
            raise
        raise ValueError(f"{what} cannot be read ({type(error).__name__}: {sentence(error)}); {remedy}.") from error
