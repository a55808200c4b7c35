"""`hf-dart doctor`: every set-up that is broken on purpose is found, with its remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny import tiny_head, tiny_target
from support.users import letters

from hf_dart.bench import examining, profiling
from hf_dart.bench.pair import load_pair
from hf_dart.cli import main
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET
from hf_dart.models.tokenizers import template_hash

ALPHABET = "".join(map(chr, range(97, 97 + 40)))
SWAPPED = "b" + "a" + ALPHABET[2:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and its head, made with the tokenizer beside it."""
    folder = tmp_path_factory.mktemp("pair")
    model, tokenizer = tiny_target("llama", dtype=torch.float32), letters(ALPHABET)
    tiny_head(model, tokenizer=tokenizer).save_pretrained(folder / "head")
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    return folder


@pytest.fixture
def pair(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def threads() -> Iterator[int]:
    """More threads than there are cores."""
    before, many = torch.get_num_threads(), examining._cores() + 2
    torch.set_num_threads(many)
    yield many
    torch.set_num_threads(before)


def examined(pair: Path) -> tuple[bool, dict[str, Any], dict[str, dict[str, Any]]]:
    report = examining.examine(str(pair / "target"), str(pair / "head"), "float32")
    return report["passed"], report, {one["name"]: one for one in report["checks"]}


def other_tokenizer(pair: Path) -> None:
    letters(SWAPPED).save_pretrained(pair / "target")


def damaged_head(pair: Path) -> None:
    file = pair / "head" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def head_of_another_target(pair: Path) -> None:
    other = tiny_target("llama", dtype=torch.float32, hidden_size=48)
    tiny_head(other).save_pretrained(pair / "head")


@pytest.mark.parametrize(
    ("breaks", "found", "remedy"),
    [
        (other_tokenizer, "was trained with the tokenizer of", "pass tokenizer="),
        (damaged_head, "truncated or damaged", "give files of one save_pretrained"),
        (head_of_another_target, "with hidden size 48", "load a drafter that was made for this target"),
    ],
)
def test_a_pair_that_does_not_load(breaks: Callable[[Path], None], found: str, remedy: str, pair: Path) -> None:
    breaks(pair)
    passed, report, checks = examined(pair)
    assert not passed
    assert not checks["drafter"]["good"]
    assert found in checks["drafter"]["found"]
    assert remedy in checks["drafter"]["remedy"]
    assert all(checks[name]["good"] for name in ("versions", "target", "dtype", "attention", "trial"))
    assert not report["settings"]


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package, a target, and a target's memory for packed weights."""
    monkeypatch.setattr(examining, "requires", lambda name: ["not-installed>=1", "torch>=99"])
    checks = {one["name"]: one for one in examining.examine(str(tmp_path), None, None)["checks"]}
    assert checks["versions"]["remedy"] == "pip install 'not-installed>=1' 'torch>=99'"
    assert "holds no config.json" in checks["target"]["found"]
    assert checks["target"]["remedy"] == "give the folder that the target was saved to."
    assert "trial" not in checks
    monkeypatch.setattr(examining, "free_memory", lambda: 1000)
    target = tiny_target("llama", "eager", dtype=torch.float32)
    found = {one["name"]: one for one in examining._model(target)}
    assert "of bfloat16's time" in found["dtype"]["found"]
    bad = {name: one["remedy"] for name, one in found.items() if not one["good"]}
    assert bad.keys() == {"memory", "attention"}
    assert bad["attention"] == "attn_implementation='sdpa'"


def test_what_slows_down_or_drafts_badly(
    pair: Path, threads: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads beyond the cores, 16 bits on a CPU without units, another template, a promise that is not kept."""
    monkeypatch.setattr(examining, "product_seconds", lambda dtype: 1e-3 if dtype == torch.float32 else 3e-3)
    config = pair / "head" / "config.json"
    fields = {"chat_template_hash": template_hash("of the training")}
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    bench = {"results": [{"method": "hf_dart", "mode": "greedy", "batch": 1, "tau": 30.0}]}
    (pair / "head" / "bench.json").write_text(json.dumps(bench))
    words = ["doctor", str(pair / "target"), str(pair / "head"), "--dtype", "bfloat16", "--new-tokens", "6"]
    assert main([*words, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    checks = {one["name"]: one for one in report["checks"]}
    bad = {name for name, one in checks.items() if not one["good"]} - {"other load", "speed"}
    assert bad == {"threads", "dtype", "chat template", "acceptance length"}
    assert f"{threads} on" in checks["threads"]["found"]
    assert checks["dtype"]["remedy"] == "dtype='float32'"
    assert "30.00 promised" in checks["acceptance length"]["found"]
    assert {"target", "device", "memory", "attention", "trial", "drafter", "tokenizer", "vocabulary"} <= checks.keys()
    assert all(one["remedy"] for name, one in checks.items() if not one["good"])
    for one in report["settings"]:
        assert one["gain"] > 1.03
        compile(one["code"].replace("...", "x=1"), "setting", "exec")
    page = examining.as_page(report)
    assert "| threads | LOOK |" in page
    assert "| same text | ok | yes" in page
    assert torch.get_num_threads() == threads


def test_drafts_that_pause_are_judged_by_what_they_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by rounds without them, of which there are most where they are dear."""
    pair = load_pair(str(PACKAGED_TARGET), str(PACKAGED_HEAD), "float32")
    pair.head.tree_config = replace(pair.head.tree_config, draft_cost=9.0, lookup=0)
    costs = SimpleNamespace(tree={"draft_cost": 9.0, "verify_costs": ((1, 1.0), (64, 2.0))})
    monkeypatch.setattr(profiling, "measure", lambda *_, **__: costs)
    monkeypatch.setattr(examining, "_PROMPTS", {"code": 1})
    monkeypatch.setattr(examining, "_load", lambda: 99.0)
    for promised, good in ((2.0, True), (9.0, False)):
        checks: list[examining.Check] = []
        monkeypatch.setattr(examining, "_promised", lambda head, promised=promised: promised)
        examining._measure(pair, 16, checks)
        (found,) = [one for one in checks if one["name"] == "acceptance length"]
        assert found["good"] == good, found
