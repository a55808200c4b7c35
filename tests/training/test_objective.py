"""Losses as a training run uses them: presets and their parameters, labels, chunks and memory."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sentences import refused
from support.tiny_training import ROWS, VOCABULARY, Largest, batch_of, examples, taught, trainer_on
from transformers import HfArgumentParser

from hf_dart.training import DartTrainingArguments, DiffusionTrainingArguments, losses
from hf_dart.training.objective.losses import NO_LABEL
from hf_dart.training.objective.objective import PRESETS, Objective
from hf_dart.training.trainers.drafts import places_and_labels

MIXED = {"loss": "dpace", "divergence": "tv", "chain_weight": 1.0, "chain_form": "log"}
OBJECTIVES = [
    *PRESETS.values(),
    *(Objective(one, position_weights=how, gamma=0.5, dpace_alpha=0.3, lk_eta=2.0)
      for one in ("ce", "kl", "tv", "lk") for how in ("uniform", "exponential", "dpace")),
    *(Objective("ce", token_weight=2.0, focal_weight=3.0, chain_weight=5.0, chain_form=form)
      for form in ("linear", "log")),
    Objective(token_weight=0.0, chain_weight=5.0),
    Objective("tv", ce_share=0.3),
]  # fmt: skip


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_an_objective_is_the_sum_of_its_parts(objective: Objective) -> None:
    draft, target, labels = examples()
    ce, one, acceptance = losses.cross_entropy(draft, labels), objective, torch.tensor([0.4] * 4, dtype=torch.float64)
    tokens = {
        "ce": ce,
        "kl": losses.kl_divergence(draft, target),
        "tv": losses.total_variation(draft, target),
        "lk": losses.lk_divergence(draft, target, acceptance, one.lk_eta),
    }[one.divergence]
    decay = torch.tensor([one.gamma**place for place in range(4)], dtype=torch.float64)
    weights = {
        "uniform": torch.full((4,), 0.25, dtype=torch.float64),
        "exponential": decay / decay.sum(),
        "dpace": losses.dpace_weights(ce, labels, one.dpace_alpha) / 4,
    }[one.position_weights]
    focal = losses.focal_loss(ce, losses.first_errors(draft, labels))
    chain = losses.chain_loss(losses.hard_chain(ce, labels), one.chain_form)
    token = (((1 - one.ce_share) * tokens + one.ce_share * ce) * weights).sum(-1)
    wanted = one.token_weight * token + one.focal_weight * focal + one.chain_weight * chain
    assert one.needs_acceptance == (one.divergence == "lk")
    torch.testing.assert_close(one(draft, target, labels, acceptance), wanted, rtol=1e-6, atol=1e-9)


def test_presets_are_what_the_papers_say() -> None:
    draft, target, labels = examples()
    ce = losses.cross_entropy(draft, labels)
    decay = torch.exp(-torch.arange(4.0, dtype=torch.float64) / 10)
    focal = losses.focal_loss(ce, losses.first_errors(draft, labels))
    chain = 40 / 15 * losses.hard_chain(ce, labels).exp().sum(-1)  # 40 times the mean of the paper's 15 draft tokens
    for name, value in {
        "dart": losses.annealed_kl(draft, target, 0.6),
        "left_to_right": (ce * decay).sum(-1) / decay.sum() + 0.3 * focal - chain,
    }.items():
        torch.testing.assert_close(PRESETS[name](draft, target, labels), value)


def test_arguments_change_the_preset_within_their_ranges(tmp_path: Path) -> None:
    changed = {
        "divergence": "tv", "ce_share": 0.2, "position_weights": "uniform", "gamma": 0.9, "dpace_alpha": 0.2,
        "lk_eta": 4.0, "token_weight": 0.5, "focal_weight": 0.1, "chain_weight": 2.0, "chain_form": "log",
    }
    assert changed.keys() == {one.name for one in fields(Objective)}
    for preset, objective in PRESETS.items():
        assert DartTrainingArguments(output_dir=str(tmp_path), loss=preset).objective == objective
        for name, value in changed.items():
            arguments = DartTrainingArguments(output_dir=str(tmp_path), loss=preset, **{name: value})
            assert arguments.objective == replace(objective, **{name: value})
    words = ["--output_dir", str(tmp_path), "--loss", "left_to_right", "--gamma", "0.9", "--chain_form", "log"]
    (parsed,) = HfArgumentParser(DartTrainingArguments).parse_args_into_dataclasses(words)
    assert parsed.objective == replace(PRESETS["left_to_right"], gamma=0.9, chain_form="log")
    wrongs: list[dict[str, Any]] = [
        {"loss": "mse"}, {"divergence": "l2"}, {"position_weights": "random"}, {"gamma": 1.1}, {"ce_share": 1.5},
        {"dpace_alpha": -0.1}, {"lk_eta": float("nan")}, {"focal_weight": -1.0}, {"chain_weight": float("inf")},
        {"chain_form": "power"}, {"token_weight": 0.0}, {"selector_only": True, "loss": "dpace"},
        {"anchors_per_row": 0}, {"revealed_share": 1.5}, {"text_weight": -1.0},
    ]
    for wrong in wrongs:
        of_diffusion = {"revealed_share", "text_weight"} & wrong.keys()
        kind = DiffusionTrainingArguments if of_diffusion else DartTrainingArguments
        refused(partial(kind, output_dir=str(tmp_path), **wrong), ValueError, f"{next(iter(wrong))}.*\\.$")


@pytest.mark.parametrize("draft_length", [1, 4])
def test_labels_are_the_tokens_behind(draft_length: int) -> None:
    """Token t of the draft after anchor n is token n + 1 + t of the row, if the document goes on so far.

    With a mask, up to the first token outside: a second reply is not after the first one's end.
    """
    batch = batch_of(ROWS, draft_length, 20)
    batch["loss_mask"] = torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(2)) < 0.7
    wanted, masked = [], []
    for row, block in (batch["anchors"] >= 0).nonzero().tolist():
        anchor, ids, written = int(batch["anchors"][row, block]), batch["input_ids"][row], batch["loss_mask"][row]
        places = [anchor + 1 + t for t in range(1, draft_length + 1)]
        inside = [p < len(ids) and batch["documents"][row, p] == batch["documents"][row, anchor] for p in places]
        wanted.append([int(ids[p]) if ok else NO_LABEL for p, ok in zip(places, inside, strict=True)])
        first = next((t for t, p in enumerate(places) if p < len(ids) and not written[p]), draft_length)
        masked.append(wanted[-1][:first] + [NO_LABEL] * (draft_length - first))
    assert places_and_labels(batch, draft_length)[1].tolist() == masked
    del batch["loss_mask"]
    assert places_and_labels(batch, draft_length)[1].tolist() == wanted
    assert any(NO_LABEL in labels for labels in wanted)


@pytest.mark.parametrize("options", [{"loss": "dart"}, {"loss": "lk"}, {"loss": "left_to_right"}, MIXED], ids=str)
def test_chunks_bound_the_memory_and_change_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    """Forward and backward: 3 blocks' logits at a time, never those of all."""
    results, largest = [], []
    for chunk in (0, 3):
        trainer = trainer_on(tmp_path, ROWS, dtype=torch.float64, loss_chunk=chunk, **options)
        target, head = trainer.target.requires_grad_(False), trainer.drafter.train()
        torch.manual_seed(1)
        batch = batch_of(ROWS, head.draft_length, 20)
        # The target is tried out once; of it there is one distribution per token, not per block, and its weights.
        goals, weights = taught(trainer, batch)[1].logits, target.lm_head.weight
        others = (goals.numel(), weights.numel())
        with Largest(lambda one, others=others: one.shape[-1] == VOCABULARY and one.numel() not in others) as mode:
            loss, outputs = trainer.compute_loss(head, batch, return_outputs=True)
            loss.backward()
        blocks = len(outputs["drafts"].hidden)
        largest.append(mode.elements)
        results.append((loss.detach(), {name: weight.grad for name, weight in head.named_parameters()}))
    per_block = head.draft_length * VOCABULARY
    assert blocks > 30
    assert largest == [blocks * per_block, 3 * per_block]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)
