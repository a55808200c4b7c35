"""Every kind of drafter, ours and published, through the commands: generate, bench, audit, view, convert, push."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eagle3 import original_checkpoint, variant
from support.modules import with_module
from support.relatives import relative
from support.sentences import assert_command_says
from support.tiny import tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target
from support.users import letters

from hf_dart.bench.pair import shown_name
from hf_dart.cli import main

OURS = {"dart": tiny_head, "eagle": tiny_eagle_drafter, "diffusion": tiny_diffusion_drafter}
EAGLES = ("EAGLE-1", "original, draft vocabulary", "modelopt", "speculators, 0.9's defaults", "peagle, one norm")
FLASHES = ("DFlash, no taps named", "DFlash2", "DSpark", "JetSpec", "speculators' DFlash, some tokens")
PUBLISHED = ("DART's code", *EAGLES, *FLASHES)
LANGUAGE_MODEL = "a language model"  # lies in files of its own and is neither converted nor pushed
QUICK = ("EAGLE-1", "DSpark", LANGUAGE_MODEL)


def save(name: str, folder: Path, target: Any) -> None:
    if name in OURS:
        OURS[name](target).save_pretrained(folder)
    elif name == LANGUAGE_MODEL:
        tiny_target("qwen3", num_hidden_layers=1, dtype=torch.float32).save_pretrained(folder)
        alphabet().save_pretrained(folder)
    elif name in PUBLISHED[:1]:
        original_checkpoint(folder, target)
    else:
        (variant if name in EAGLES else relative)(folder, target, name, dtype=torch.float32)


def alphabet() -> Any:
    return letters("".join(map(chr, range(97, 97 + 40))))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model, folder = tiny_target("llama", num_hidden_layers=8, dtype=torch.float32), tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    alphabet().save_pretrained(folder)
    (folder / "text.txt").write_text("abcd" * 40)
    return model, folder


def runs(given: list[str], text: Path, page: Path) -> int:
    """What drafts only; return how many parameters the drafter adds."""
    short, modes = ["--max-new-tokens", "6", "abcabc"], ["--modes", "greedy", "--drafter", given[-1]]
    assert main(["generate", *given, "--stats", *short]) == 0
    assert main(["bench", *given, "--smoke", "--text", str(text), *modes, "--json", f"{page}.json"]) == 0
    bench = json.loads(Path(f"{page}.json").read_text())
    assert bench["text"] == text.name
    name = f"hf_dart, {shown_name(given[-1])}"
    assert name in {one["method"] for one in bench["results"]}
    assert bench["drafters"][name] == bench["head_parameters"]
    assert main(["audit", *given, "--new-tokens", "6", "abcdabc"]) == 0
    assert main(["view", *given, *short, "--output", str(page)]) == 0
    assert "<html" in page.read_text()
    return int(bench["head_parameters"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.matrix)
        for name in (*OURS, *PUBLISHED, LANGUAGE_MODEL)
    ],
)
def test_commands(target: tuple[Any, Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, folder = target
    head = tmp_path / "head"
    head.mkdir()
    save(name, head, model)
    (head / "README.md").write_text("---\nlicense: mit\n---\n")
    added = runs(["--target", str(folder), "--head", str(head)], folder / "text.txt", tmp_path / "page.html")
    convert = ["convert", str(head), str(tmp_path / "ours"), "--to", "dart", "--target", str(folder)]
    assert "drafts accepted" in capsys.readouterr().err
    if name == LANGUAGE_MODEL:
        assert added == tiny_target("qwen3", num_hidden_layers=1).num_parameters()
        assert_command_says(convert, "which that format has no place for", capsys)
        return
    assert main(convert) == 0
    ours = tmp_path / "ours"
    assert main(["generate", "--target", str(folder), "--head", str(ours), "--max-new-tokens", "6", "abc"]) == 0
    assert main(["push", str(ours), "me/head", "--license", "mit", "--dry-run", str(tmp_path / "pushed")]) == 0
    card = (tmp_path / "pushed" / "README.md").read_text()
    assert "license: mit" in card
    assert ("| published as | `head`, in another format |" in card) == (name in PUBLISHED)


def test_commands_of_the_targets_own_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "target"
    _, weights = with_module("qwen3_next", folder, torch.float32)
    alphabet().save_pretrained(folder)
    (folder / "text.txt").write_text("abcd" * 40)
    added = runs(["--target", str(folder), "--head", str(folder)], folder / "text.txt", tmp_path / "page.html")
    assert added == sum(weight.numel() for weight in weights.values()), "without the target's"
    assert main(["convert", str(folder), str(tmp_path / "out"), "--to", "dart", "--target", str(folder)]) == 2
    assert "is a MtpDrafter, which that format has no place for" in capsys.readouterr().err
    assert main(["push", str(folder), "me/head", "--dry-run", str(tmp_path / "pushed")]) == 2
