"""LoRA on a head: training moves the adapter alone, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_training import LENGTHS, tiny_head, tiny_target, tiny_trainer, token_rows

from hf_dart import DartHead
from hf_dart.training.lora import LoraArguments, apply_lora


def tiny_pair(copied: bool, folder: Path) -> tuple[Any, DartHead]:
    target = tiny_target()
    if copied:
        return target, tiny_head(target, copy_layer="last", feature_layers=[1, 2])
    tiny_head(target).save_pretrained(folder)
    return target, DartHead.from_pretrained(str(folder), target=target)


@pytest.mark.parametrize("copied", [False, True], ids=["trained", "copied"])
def test_training_touches_the_adapter_alone_and_resumes(copied: bool, tmp_path: Path) -> None:
    rows = token_rows(LENGTHS * 4)
    results = []
    for resume in (False, True):
        target, head = tiny_pair(copied, tmp_path / "base")
        apply_lora(head, LoraArguments(lora_rank=2))
        before = {name: value.clone() for name, value in head.state_dict().items()}
        run_folder = tmp_path / "run"
        trainer = tiny_trainer(
            run_folder, head, target, rows, rows, max_steps=8, save_strategy="steps", save_steps=4, logging_steps=4
        )
        trainer.train(resume_from_checkpoint=str(run_folder / "checkpoint-4") if resume else None)
        changed = {name for name, value in head.state_dict().items() if not torch.equal(value, before[name])}
        assert changed
        assert all("lora_" in name or "modules_to_save" in name for name in changed)
        results.append(head.state_dict())
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name])
    checkpoint = run_folder / "checkpoint-8"
    assert not (checkpoint / "model.safetensors").exists()
    loaded = DartHead.from_pretrained(str(checkpoint), target=target)
    for name, value in loaded.state_dict().items():
        if "original_module" not in name:  # what new parts were before training is not kept
            torch.testing.assert_close(value, head.state_dict()[name], rtol=0, atol=0)
