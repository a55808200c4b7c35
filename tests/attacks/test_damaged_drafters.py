"""Damaged files of drafters of every kind and format: refused in one sentence, or read as what they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support.assistants import assistant_checkpoint, gemma4_target, stock_assistant
from support.attacks import attack, damaged, seeds, survives
from support.checkpoints import save
from support.compare import assert_identical
from support.eagle3 import MODELOPT, ORIGINAL, SPECULATORS, eagle3_config, eagle3_tensors, original_checkpoint, variant
from support.guests import dflash_checkpoint
from support.modules import with_module
from support.relatives import relative
from support.tiny import prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target

from hf_dart import DartHead, DFlashDrafter, LanguageModelDrafter, MtpDrafter, TreeConfig, load_drafter


def saved(make: Callable[[Any], Any]) -> Callable[[Path, Any], Any]:
    return lambda folder, target: make(target).save_pretrained(folder)


def adapter(folder: Path, target: Any) -> None:
    head = tiny_head(target)
    head.save_pretrained(folder.with_name("base"))
    head.add_adapter(LoraConfig(r=2))
    head.save_pretrained(folder)


def eagle3(style: str, pickled: bool = False) -> Callable[[Path, Any], Any]:
    def write(folder: Path, target: Any) -> None:
        config = eagle3_config(target, style, draft_vocab_size=20)
        save(folder, config, eagle3_tensors(config), pickled=pickled)

    return write


FORMATS: dict[str, Callable[[Path, Any], Any]] = {
    "dart": saved(tiny_head),
    "eagle": saved(tiny_eagle_drafter),
    "diffusion": saved(tiny_diffusion_drafter),
    "adapter": adapter,
    "EAGLE-3, original": eagle3(ORIGINAL),
    "EAGLE-3, pickled": eagle3(ORIGINAL, pickled=True),
    "EAGLE-3, ModelOpt": eagle3(MODELOPT),
    "EAGLE-3, speculators": eagle3(SPECULATORS),
    **{name: lambda folder, target, name=name: variant(folder, target, name) for name in
       ("EAGLE-1", "EAGLE-2, Qwen2's", "peagle, 0.9's defaults")},
    **{name: lambda folder, target, name=name: relative(folder, target, name) for name in
       ("DFlash2", "Domino", "speculators' DSpark")},
    "DFlash, z-lab": dflash_checkpoint,
    "Gemma 4 assistant": lambda folder, _: assistant_checkpoint(folder, stock_assistant(ordered=True, vocab_size=48)),
    "original DART": lambda folder, target: original_checkpoint(folder, target, draft_vocab_size=30),
    "language model": lambda folder, target: tiny_target("qwen3", num_hidden_layers=1).save_pretrained(folder),
}  # fmt: skip
# Those whose own class is asked: the files may be taken for those of another kind.
CLASSES: dict[str, Any] = {
    "DFlash, z-lab": DFlashDrafter,
    "original DART": DartHead,
    "language model": LanguageModelDrafter,
}
SUFFIXES = (".json", ".safetensors", ".bin")


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("llama", num_hidden_layers=8)


@pytest.mark.parametrize("part", seeds(12, 1100))
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files(target: Any, tmp_path: Path, name: str, part: range) -> None:
    """Weights that are read draft worse at most: the text is the target's."""
    target, folder = gemma4_target(vocab_size=48) if "Gemma 4" in name else target, tmp_path / "drafter"
    FORMATS[name](folder, target)
    load = CLASSES[name].from_pretrained if name in CLASSES else load_drafter
    load(str(folder), target=target)
    files = [file for file in sorted(folder.iterdir()) if file.suffix in SUFFIXES and "generation" not in file.name]
    assert len(files) >= 2
    for file in files:
        assert attack(file, lambda: load(str(folder), target=target), part) < len(part)
    weights = next(file for file in files if file.suffix != ".json")
    whole = weights.read_bytes()
    for seed in part[1::10]:
        weights.write_bytes(damaged(whole, seed))
        if survives(lambda: load(str(folder), target=target)):
            drafter = load(str(folder), target=target)
            shape = TreeConfig(nodes=8)
            assert_identical(target, drafter, prompts([5]), do_sample=False, max_new_tokens=6, tree_config=shape)


@pytest.mark.parametrize("part", seeds(12, 400))
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_damaged_modules_of_targets(tmp_path: Path, family: str, part: range) -> None:
    target, _ = with_module(family, tmp_path, torch.float64)
    for name in ("config.json", "model.safetensors"):
        attack(tmp_path / name, lambda: MtpDrafter.from_pretrained(str(tmp_path), target=target), part)
