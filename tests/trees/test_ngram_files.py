"""Damaged tables: refused in one sentence, without allocating what a false head asks for."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.attacks import attack, seeds
from support.memory import traced_peak
from support.ngrams import VOCABULARY, corpus

from hf_dart import NgramTable
from hf_dart.trees.ngram.build import build


@pytest.fixture
def table(tmp_path: Path) -> NgramTable:
    return build(corpus(), tmp_path / "table", vocab_size=VOCABULARY)


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put_together(path: Path, header: dict[str, Any], data: bytes) -> Path:
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def refused(path: Path) -> str:
    """The message; refusing takes no memory to speak of."""
    said: list[str] = []

    def load() -> None:
        with pytest.raises(ValueError, match=r"\.$") as caught:
            NgramTable.load(path)
        said.append(str(caught.value))

    assert traced_peak(load) < 4e6
    assert str(path) in said[0]
    return said[0]


def answers(path: Path) -> None:
    """What a table says of any tokens is a probability."""
    contexts = np.array([[a, b] for a in range(-1, VOCABULARY + 3) for b in range(-1, VOCABULARY + 3)])
    candidates = np.tile(np.arange(-1, VOCABULARY + 3), (len(contexts), 1))
    shares = NgramTable.load(path).probabilities(contexts, candidates)
    assert np.isfinite(shares).all()
    assert 0 <= shares.min() <= shares.max() <= 1


def test_truncated_or_other_files(tmp_path: Path, table: NgramTable) -> None:
    content = table.path.read_bytes()
    broken = tmp_path / "broken"
    cut = [content[:length] for length in (0, 5, 8, 100, len(content) // 2, len(content) - 1)]
    for other in (*cut, struct.pack("<Q", 2**62) + content[8:], content + b"more"):
        broken.write_bytes(other)
        assert "cannot be read" in refused(broken)
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match="There is no file"):
            NgramTable.load(path)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("format", ["other"], "no n-gram table"),
        ("version", ["2"], "version '2'"),
        ("order", ["4", "9" * 5000, "three"], "damaged"),
        ("order", ["60"], "fits into 63 bits"),
        ("vocab_size", [str(2**31)], "fits into 63 bits"),
        ("vocab_size", ["12"], "shapes and types"),
        ("tokens", [str(2**63), "-1"], "damaged"),
        ("min_counts", ["1", "0,1", "1,x"], "damaged"),
    ],
)
def test_a_wrong_head(tmp_path: Path, table: NgramTable, name: str, values: list[str], message: str) -> None:
    header, data = parts(table.path)
    for value in values:
        header["__metadata__"][name] = value
        assert message in refused(put_together(tmp_path / "broken", header, data))


def test_wrong_arrays(tmp_path: Path, table: NgramTable) -> None:
    broken = tmp_path / "broken"
    header, data = parts(table.path)
    size = len(table.keys[1])
    begin, end = header["keys.3"]["data_offsets"]
    for dtype, shape in (("F64", [size]), ("U64", [size]), ("I64", [size, 1]), ("I32", [2 * size])):
        wrong = {**header, "keys.3": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}
        assert "shapes and types" in refused(put_together(broken, wrong, data))
    for shape, offsets in (([2**60], [begin, end]), ([2**60], [begin, begin + 2**63]), ([size], [begin - 8, end])):
        wrong = {**header, "keys.3": {"dtype": "I64", "shape": shape, "data_offsets": offsets}}
        assert "cannot be read" in refused(put_together(broken, wrong, data))
    wrong = {("keys.9" if name == "keys.3" else name): value for name, value in header.items()}
    assert "no whole n-gram table" in refused(put_together(broken, wrong, data))


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("keys.3", 5, 0),
        ("keys.3", slice(None), -1),
        ("keys.2", -1, 2**62),
        ("keys.2", 0, -(2**63)),
        ("keys.3", -1, (12 << 8) | (14 << 4)),
        ("counts.2", 3, 0),
        ("counts.2", 3, 2**32 - 1),
        ("counts.1", 3, 2**62),
        ("counts.1", slice(None), -(2**63)),
    ],
)
def test_wrong_content(tmp_path: Path, table: NgramTable, name: str, place: int | slice, value: int) -> None:
    """Useless but harmless."""
    header, data = parts(table.path)
    begin, end = header[name]["data_offsets"]
    array = np.frombuffer(data[begin:end], dtype="<u4" if header[name]["dtype"] == "U32" else "<i8").copy()
    array[place] = value
    answers(put_together(tmp_path / "broken", header, data[:begin] + array.tobytes() + data[end:]))


@pytest.mark.parametrize("part", seeds(150, 3000))
def test_mutated_files(tmp_path: Path, table: NgramTable, part: range) -> None:
    """Refused in one sentence, or read as a table that answers with numbers."""
    file = Path(shutil.copy(table.path, tmp_path / "mutated"))  # the table reads its own
    assert 0 < attack(file, lambda: answers(file), part) < len(part)
