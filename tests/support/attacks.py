"""Hostile and damaged files: many mutations of a good one, each refused in one sentence or read as what it is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from hf_dart.errors import UserError

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 10**40, 0.5, -2.5, 1e300, "", "x", "../../etc", "float32",
    [], [0], [1, 1], [-1], [2**40], ["x"], {}, {"a": 1}, [[1]], {"rope_type": "dynamic", "rope_theta": 1.0},
]  # fmt: skip


def damaged(content: bytes, seed: int) -> bytes:
    """One random change of a binary file: cut off, bytes changed, put in or taken out, a number made large."""
    random = Random(seed)
    at = random.choice([random.randrange(len(content)), random.randrange(min(len(content), 400))])
    kind = seed % 6
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + bytes([content[at] ^ 1 << random.randrange(8)]) + content[at + 1 :]
    if kind == 2:
        return content[:at] + random.randbytes(random.randrange(1, 16)) + content[at:]
    if kind == 3:
        return content[:at] + content[at + random.randrange(1, 16) :]
    if kind == 4:
        number = random.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, len(content)])
        return content[:at] + number.to_bytes(8, "little") + content[at + 8 :]
    return content[:at] + content[:at] + content[at:]


def changed(config: dict[str, Any], seed: int) -> str:
    """One random change of a JSON object: a field taken out, given another value, or put in; or of its text."""
    random = Random(seed)
    if seed % 8 == 7:
        return damaged(json.dumps(config).encode(), random.randrange(2**30)).decode("latin1")
    config = copy.deepcopy(config)
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    part = random.choice(parts)
    name = random.choice(sorted(part) or ["x"])
    if seed % 8 == 6:
        part[f"{name}_2"] = random.choice(VALUES)
    elif seed % 8 == 5:
        part.pop(name, None)
    else:
        part[name] = random.choice(VALUES)
    return json.dumps(config)


def survives(read: Callable[[], Any]) -> bool:
    """Run a reader on a mutated file: was it read? If not, the refusal is one sentence, and nothing was moved."""
    state, refusal = torch.get_rng_state(), None
    try:
        read()
    except (ValueError, OSError) as error:
        refusal = str(error).strip()
    assert torch.equal(torch.get_rng_state(), state)
    if refusal is not None:
        assert "\n" not in refusal, refusal
        assert refusal.endswith("."), refusal
    return refusal is None


def attack(file: Path, read: Callable[[], Any], part: range) -> int:
    """Damage a file once for each seed, by its kind, and run the reader; how many of them were read.

    JSON is mostly changed as such, everything else as bytes. The file is whole again afterwards.
    """
    whole, were_read = file.read_bytes(), 0
    for seed in part:
        text = changed(json.loads(whole), seed).encode("latin1") if file.suffix == ".json" and seed % 4 else None
        file.write_bytes(damaged(whole, seed) if text is None else text)
        were_read += survives(read)
    file.write_bytes(whole)
    return were_read


def as_one_line(read: Callable[[], Any]) -> Callable[[], Any]:
    """A reader of a command, whose errors are what the command prints: the remedy of some is a question."""

    def reading() -> Any:
        try:
            return read()
        except (UserError, ValueError) as error:
            raise ValueError(f"{str(error).rstrip('.?')}.") from error

    return reading


def seeds(fast: int, all_of_them: int) -> list[Any]:
    """Ranges of seeds for `parametrize`: a sample by default, the rest with -m matrix."""
    return [range(fast), pytest.param(range(fast, all_of_them), marks=pytest.mark.matrix)]
