"""`hf-dart audit`: it passes what is exact and fails what is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.attention_kernels import OWN, own_kernel
from support.tiny import PAD, prompts, tiny_head, tiny_target

from hf_dart.bench.auditing import audit
from hf_dart.bench.pair import Pair
from hf_dart.bench.speed import Settings
from hf_dart.cli import main
from hf_dart.decoding.rows import Rows
from hf_dart.decoding.walk import NoiseStream

PROMPTS = [
    "import os\n\n\ndef join(left, right):\n    ",
    "class Reader:\n    def __init__(self, path: Path) -> None:\n        self.path = path\n        self.",
]


def tiny_pair() -> Pair:
    model = tiny_target("qwen3")
    return Pair(model, tiny_head(model), SimpleNamespace(pad_token_id=PAD), "tiny", "tiny")


def test_float64_is_identical_and_so_is_the_control() -> None:
    texts = [ids[ids != PAD].tolist() for ids in prompts([9, 5, 7])["input_ids"]]
    done = audit(tiny_pair(), texts, Settings(prompts=3, new_tokens=24))
    assert done["passed"]
    assert done["attention"] == {"own": "sdpa", "trees": "sdpa"}
    same = {"drafted": None, "drafted_batch": None}
    modes = {"greedy": {**same, "control": None}, "sampled, T=1": same}
    assert done["findings"] == [
        {"mode": mode, "prompt": number, **found} for mode, found in modes.items() for number in (1, 2, 3)
    ]
    assert (done["settings"]["repeats"], done["settings"]["batches"]) == (1, (1, 3))
    assert done["compared"] == {"rows": 12, "near_ties": 0, "differences": 0, "generator": True}


def test_it_says_which_kernel_verifies_trees(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, words = tmp_path / "audit.json", ["audit", *PROMPTS, "--new-tokens", "8"]
    with own_kernel():
        assert main([*words, "--attn-implementation", OWN, "--json", str(file)]) == 0
    assert f"{OWN} takes no tree mask, so sdpa verifies trees" in capsys.readouterr().out
    assert json.loads(file.read_text(encoding="utf8"))["attention"] == {"own": OWN, "trees": "sdpa"}


def wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk that emits another token than the target chose, first of all: up to there nothing else can differ."""
    append = Rows.append

    def broken(self: Rows, row: int, token: int) -> bool:
        return append(self, row, (token + 7) % 500 if self.emitted[row] == 0 else token)

    monkeypatch.setattr(Rows, "append", broken)


def early_end(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Rows.room
    monkeypatch.setattr(Rows, "room", lambda self, row: room(self, row) - 1)


def generator_unmoved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoiseStream, "leave_as_stock", lambda self, steps: None)


@pytest.mark.parametrize(
    ("breakage", "dtype", "cell", "says"),
    [
        (wrong_token, "bfloat16", "| token 1: ", "8 of them beyond 4 ulp"),
        (early_end, "float32", "| token 6: impossible (no near-tie) |", "6 with a first difference, 6 of them beyond"),
        (generator_unmoved, "float32", "| as stock | as stock |", "generator left as stock leaves it: no"),
    ],
    ids=["wrong token", "early end", "generator"],
)
def test_what_is_broken_fails(
    breakage: Callable[[pytest.MonkeyPatch], None],
    dtype: str,
    cell: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    breakage(monkeypatch)
    file = tmp_path / "audit.json"
    assert main(["audit", *PROMPTS, "--new-tokens", "6", "--dtype", dtype, "--json", str(file)]) == 1
    shown = capsys.readouterr().out
    assert cell in shown
    assert says in shown
    assert shown.rstrip().endswith("audit: FAILED")
    report = json.loads(file.read_text(encoding="utf8"))
    assert not report["passed"]
    # Stock against stock is not touched by any of this.
    controls = [one["control"] for one in report["findings"] if "control" in one]
    assert controls
    assert all(one is None or one["near_tie"] for one in controls)
