"""Every kind of drafter, ours and published, through the commands: generate, bench, audit, view, convert, push."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eagle3 import original_checkpoint, variant
from support.letters import letters
from support.modules import with_module
from support.relatives import relative
from support.tiny import tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target

from hf_dart.cli import main
from hf_dart.hub.loading import PACKAGED_TARGET

Make = Callable[[Path, Any], Any]


def saved(make: Callable[[Any], Any]) -> Make:
    return lambda folder, target: make(target).save_pretrained(folder)


def published(name: str) -> Make:
    return lambda folder, target: variant(folder, target, name, dtype=torch.float32)


def flash(name: str) -> Make:
    return lambda folder, target: relative(folder, target, name, dtype=torch.float32)


def small_model(folder: Path, target: Any) -> None:
    tiny_target("qwen3", num_hidden_layers=1, dtype=torch.float32).save_pretrained(folder)
    alphabet().save_pretrained(folder)


def original_dart(folder: Path, target: Any) -> None:
    original_checkpoint(folder, target)


def alphabet() -> Any:
    return letters("".join(map(chr, range(97, 97 + 40))))


OURS: dict[str, Make] = {
    "dart": saved(tiny_head),
    "eagle": saved(tiny_eagle_drafter),
    "diffusion": saved(tiny_diffusion_drafter),
}
PUBLISHED: dict[str, Make] = {
    "DART's code": original_dart,
    "EAGLE-1": published("EAGLE-1"),
    "EAGLE-3": published("original, draft vocabulary"),
    "EAGLE-3, ModelOpt": published("modelopt"),
    "EAGLE-3, speculators": published("speculators, 0.9's defaults"),
    "P-EAGLE": published("peagle, one norm"),
    "DFlash": flash("DFlash, no taps named"),
    "DFlash2": flash("DFlash2"),
    "DSpark": flash("DSpark"),
    "JetSpec": flash("JetSpec"),
    "DFlash, speculators": flash("speculators' DFlash, some tokens"),
}
NOT_KEPT: dict[str, Make] = {"a language model": small_model}
"""What lies in files of its own and is neither converted nor pushed."""
QUICK = ("EAGLE-1", "DSpark")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model, folder = tiny_target("llama", num_hidden_layers=8, dtype=torch.float32), tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    alphabet().save_pretrained(folder)
    (folder / "text.txt").write_text("abcd" * 40)
    return model, folder


def runs(given: list[str], text: Path, page: Path) -> None:
    """What drafts only."""
    short = ["--max-new-tokens", "6", "abcabc"]
    assert main(["generate", *given, "--stats", *short]) == 0
    assert main(["bench", *given, "--smoke", "--text", str(text), "--modes", "greedy", "--json", f"{page}.json"]) == 0
    assert main(["audit", *given, "--new-tokens", "6", "abcdabc"]) == 0
    assert main(["view", *given, *short, "--output", str(page)]) == 0
    assert "<html" in page.read_text()


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix)
        for name in (*OURS, *PUBLISHED, *NOT_KEPT)
    ],
)
def test_commands(target: tuple[Any, Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, folder = target
    head = tmp_path / "head"
    head.mkdir()
    {**OURS, **PUBLISHED, **NOT_KEPT}[name](head, model)
    (head / "README.md").write_text("---\nlicense: mit\n---\n")
    runs(["--target", str(folder), "--head", str(head)], folder / "text.txt", tmp_path / "page.html")
    convert = ["convert", str(head), str(tmp_path / "ours"), "--to", "dart", "--target", str(folder)]
    capsys.readouterr()
    if name in NOT_KEPT:
        assert main(convert) == 2
        assert "which that format has no place for" in capsys.readouterr().err
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
    with_module("qwen3_next", folder, torch.float32)
    alphabet().save_pretrained(folder)
    (folder / "text.txt").write_text("abcd" * 40)
    runs(["--target", str(folder), "--head", str(folder)], folder / "text.txt", tmp_path / "page.html")
    assert main(["convert", str(folder), str(tmp_path / "out"), "--to", "dart", "--target", str(folder)]) == 2
    assert "is a MtpDrafter, which that format has no place for" in capsys.readouterr().err
    assert main(["push", str(folder), "me/head", "--dry-run", str(tmp_path / "pushed")]) == 2


@pytest.mark.matrix
def test_a_peagle_head_for_the_packaged_target_is_trained_exported_and_read(tmp_path: Path) -> None:
    """No id of its vocabulary is without a token: the pad stands in for the mask."""
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n\n\n" * 300)
    words = ["train", "--mask_mode", "peagle", "--train_data", str(tmp_path / "text.txt"), "--max_steps", "2"]
    words += ["--max_length", "65", "--draft_length", "4", "--use_cpu", "True", "--report_to", "none"]
    assert main([*words, "--output_dir", str(tmp_path / "run")]) == 0
    assert main(["convert", str(tmp_path / "run" / "final"), str(tmp_path / "theirs"), "--to", "vllm"]) == 0
    given = ["--target", str(PACKAGED_TARGET), "--head", str(tmp_path / "theirs")]
    assert main(["generate", *given, "--max-new-tokens", "8", "def f("]) == 0
