"""A head learns on rows with images, from features and embeddings of the forward that saw them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.multimodal import image_inputs, multimodal_target
from support.tiny import tiny_diffusion_drafter
from support.tiny_training import tiny_head, tiny_trainer

from hf_dart import attach
from hf_dart.drafters.eagle.drafter import EagleDrafter
from hf_dart.training import DiffusionTrainer, EagleTrainer, image_row
from hf_dart.training.data.images import collate

LENGTH = 24
WORDS = {"suppress_tokens": [43, 44, 45, 46, 47]}


def prompt(family: str, seed: int) -> dict[str, torch.Tensor]:
    """One text with an image, the larger one of two where they differ."""
    return image_inputs(family, 1, seed=seed, image=seed, turned=seed % 2 == 0)


def own_rows(target: Any, family: str, count: int, first: int) -> list[dict[str, Any]]:
    rows = []
    for seed in range(first, first + count):
        inputs = prompt(family, seed)
        rows.append(image_row(inputs, target.generate(**inputs, do_sample=False, max_new_tokens=LENGTH, **WORDS)))
    return rows


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_blocks_read_what_drafting_reads(family: str, tmp_path: Path) -> None:
    """Features and embeddings of a row in a padded batch are those of its own prompt in `generate`."""
    target = multimodal_target(family)
    rows = own_rows(target, family, 2, 0)
    head = tiny_head(target)
    trainer = tiny_trainer(tmp_path, head, target, rows)
    batch = collate(rows)
    lengths = [len(row["input_ids"]) for row in rows]
    assert family == "llava" or lengths[0] != lengths[1]
    assert (batch["documents"] >= 0).sum(1).tolist() == lengths
    places = torch.arange(batch["input_ids"].numel())
    features, goals, read = trainer.teacher.images(batch["input_ids"], batch["beside"], places, True)
    for number, row in enumerate(rows):
        length = lengths[number]
        given = prompt(family, number)["input_ids"].shape[1]
        assert row["loss_mask"].tolist() == [at >= given for at in range(length)]
        with torch.no_grad():
            alone = target(input_ids=row["input_ids"][None], **row["beside"], output_hidden_states=True)
        wanted = torch.cat([alone.hidden_states[layer] for layer in head.feature_layers], dim=-1)
        torch.testing.assert_close(features[number, :length].double(), wanted[0], rtol=1e-4, atol=1e-4)
        here = number * batch["input_ids"].shape[1] + torch.arange(length)
        torch.testing.assert_close(goals.at(here), alone.logits[0])
        torch.testing.assert_close(read[number, :length], alone.hidden_states[0][0])
    places = batch["input_ids"] == 47
    own = target.get_input_embeddings()(batch["input_ids"])
    assert not (read[places] == own[places]).all(-1).any()
    assert torch.equal(read[~places], own[~places])
    with pytest.raises(ValueError, match="does not begin with the one prompt"):
        image_row(prompt(family, 0), rows[1]["input_ids"])


@pytest.mark.parametrize("family", ["llava", pytest.param("qwen2_5_vl", marks=pytest.mark.matrix)])
def test_tau_rises_on_images(family: str, tmp_path: Path) -> None:
    target = attach(multimodal_target(family).float())
    rows, held_out = own_rows(target, family, 32, 0), own_rows(target, family, 8, 100)
    head = tiny_head(target, feature_layers=[0, 2, 4])
    trainer = tiny_trainer(tmp_path, head, target, rows, held_out, max_steps=60, per_device_train_batch_size=8)
    before = trainer.evaluate()["eval_tau"]
    trainer.train()
    after = trainer.evaluate()["eval_tau"]
    assert before < 1.3
    assert after > before + 0.25


def test_eagle_learns_on_images_and_diffusion_says_that_it_does_not(tmp_path: Path) -> None:
    target = attach(multimodal_target("llava").float())
    rows = own_rows(target, "llava", 8, 0)
    drafter = EagleDrafter.from_target(target, feature_layers=[0, 2, 3], draft_length=4)
    trainer = tiny_trainer(tmp_path, drafter, target, rows, rows, kind=EagleTrainer, max_steps=10)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    with pytest.raises(ValueError, match=r"DiffusionTrainer takes no images or sounds; give rows of text\."):
        tiny_trainer(tmp_path, tiny_diffusion_drafter(target), target, rows, kind=DiffusionTrainer).train()
    with pytest.raises(ValueError, match=r"decode_prompts are of text, .* leave decode_prompts out\."):
        tiny_trainer(tmp_path, tiny_head(target), target, rows, rows, decode_prompts=2)
