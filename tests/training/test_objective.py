"""Blocks and losses as a run uses them: the shared pass, presets and parameters, labels, chunks and memory."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.memory import Largest
from support.sentences import refused
from support.tiny_training import ROWS, VOCABULARY, batch_of, examples, taught, tiny_head, trainer_on
from transformers import HfArgumentParser

from hf_dart.drafters.layers import take
from hf_dart.training import DartTrainingArguments, DiffusionTrainingArguments, losses
from hf_dart.training.objective.blocks import build_blocks, draw_anchors
from hf_dart.training.objective.losses import NO_LABEL, annealed_kl
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
    }  # fmt: skip
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
    ]  # fmt: skip
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


@pytest.mark.parametrize("draft_length", [1, 2, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_anchors_leave_room_for_the_draft_whose_first_token_counts(draft_length: int, masked: bool) -> None:
    documents = torch.arange(40).div(15, rounding_mode="floor").repeat(6, 1)
    documents[:, 37:] = -1
    mask = torch.rand(6, 40, generator=torch.Generator().manual_seed(1)) < 0.5 if masked else None

    def possible(row: int, anchor: int) -> bool:
        of, first = documents[row].tolist(), anchor + 2
        if mask is not None and not (first < 40 and of[first] == of[anchor] and mask[row, first]):
            return False
        return 0 <= of[anchor] == of[anchor + draft_length]

    wanted = [[anchor for anchor in range(40 - draft_length) if possible(row, anchor)] for row in range(6)]
    for count in (5, 40):
        anchors = draw_anchors(documents, count, draft_length, loss_mask=mask)
        for row, all_of_them in zip(anchors.tolist(), wanted, strict=True):
            chosen = [anchor for anchor in row if anchor >= 0]
            assert len(chosen) == min(count, len(all_of_them))
            assert set(chosen) <= set(all_of_them)
            assert row == sorted(set(chosen)) + [-1] * (count - len(chosen))
    assert (draw_anchors(documents[:, :draft_length], 2, draft_length) == -1).all()


@pytest.mark.parametrize(("draft_length", "layers"), [(1, 1), (1, 2), (5, 1), (5, 2)])
@pytest.mark.parametrize("block_attention", ["causal", "bidirectional"])
def test_blocks_are_what_propose_drafts(tmp_path: Path, draft_length: int, layers: int, block_attention: str) -> None:
    """The shared pass over packed documents equals drafting one block at a time, each document alone.

    The last layer leaves out the real positions that draft nothing; gradients are those of all of them.
    """
    config = {"draft_length": draft_length, "num_layers": layers, "block_attention": block_attention}
    trainer = trainer_on(tmp_path, ROWS, head=partial(tiny_head, **config), dtype=torch.float64)
    head, target, batch = trainer.drafter, trainer.target, batch_of(ROWS, draft_length, 7)
    ids, documents, anchors = batch["input_ids"], batch["documents"], batch["anchors"]
    features, goals = taught(trainer, batch)
    blocks = build_blocks(documents, anchors, draft_length, block_attention == "bidirectional")
    everything = head(features[:, :-1], head.embed(ids[:, 1:]), blocks.positions, blocks.mask)
    whole = take(everything, blocks.entries).unflatten(1, (-1, draft_length))
    hidden = trainer.block_states(head, batch, features, goals)
    torch.testing.assert_close(hidden, whole, rtol=0, atol=1e-12)
    own = {"inputs": list(head.parameters()), "allow_unused": True, "materialize_grads": True}
    gradients = [torch.autograd.grad(some.sin().sum(), **own) for some in (hidden, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)

    losses = []
    for row, block in (anchors >= 0).nonzero().tolist():
        anchor = int(anchors[row, block])
        here = (documents[row] == documents[row, anchor]).nonzero().flatten()
        begin, length = int(here[0]), anchor + 1 - int(here[0])
        with torch.no_grad():
            alone = target(ids[row : row + 1, here], output_hidden_states=True)
            seen = torch.cat([alone.hidden_states[layer] for layer in head.feature_layers], dim=-1)[:, :length]
            following = ids[row : row + 1, begin + 1 : anchor + 2]
            proposal = head.propose(head.begin(1, 8), seen, following, torch.tensor([length]))
        torch.testing.assert_close(hidden[row, block], proposal.hidden[0], rtol=0, atol=1e-12)
        # Draft token t is token n + 1 + t, which the target predicts at position n + t.
        wanted = alone.logits[0, length : length + draft_length]
        places = row * ids.shape[1] + torch.arange(anchor + 1, anchor + 1 + draft_length)
        torch.testing.assert_close(goals.at(places), wanted, rtol=0, atol=1e-12)
        losses.append(annealed_kl(proposal.logits, wanted[None]).item())
    assert len(losses) >= 15
    with torch.no_grad():
        assert trainer.compute_loss(head, batch).item() == pytest.approx(np.mean(losses), rel=1e-5)
