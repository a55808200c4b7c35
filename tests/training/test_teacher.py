"""Logits of the target's own forward where drafts learn from it, and never those of all tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.memory import Largest
from support.tiny_training import ROWS, VOCABULARY, batch_of, taught, tiny_head, tiny_target, tiny_trainer, token_rows
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM

from hf_dart.drafters.draft_vocabulary import LMHeadRows
from hf_dart.training.objective.blocks import document_positions
from hf_dart.training.objective.losses import NO_LABEL
from hf_dart.training.trainers import teacher
from hf_dart.training.trainers.drafts import as_columns
from hf_dart.training.trainers.evaluation import count_drafts, counts_by_row
from hf_dart.trees.vocabulary import spread

SOME = torch.arange(3, VOCABULARY, 2)
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def softcapped() -> Any:
    """A target that bounds its logits after its LM head."""
    torch.manual_seed(0)
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    fields |= {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 8}
    config = Gemma2Config(**fields, initializer_range=0.3, final_logit_softcapping=3.0)
    return Gemma2ForCausalLM(config).double().eval()


def forbidding() -> Any:
    """A target that leaves out some tokens by their columns, as Chameleon does its images'."""
    target = tiny_target(torch.float64)

    def forbid(module: Any, given: Any, output: Any) -> None:
        output.logits[:, :, [5, 9]] = torch.finfo(output.logits.dtype).min

    target.register_forward_hook(forbid)
    return target


def whole_logits(target: Any, batch: dict[str, Tensor]) -> Tensor:
    """[B T, V] of one plain forward."""
    positions = document_positions(batch["documents"])
    return target(input_ids=batch["input_ids"], position_ids=positions, use_cache=False).logits.flatten(0, 1)


TARGETS = {"plain": lambda: tiny_target(torch.float64), "softcapped": softcapped, "forbidding": forbidding}


@torch.no_grad()
@pytest.mark.parametrize("everything", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("vocabulary", [None, SOME], ids=["all", "some"])
@pytest.mark.parametrize("kind", TARGETS)
def test_goals_are_the_logits_of_a_plain_forward(
    kind: str, vocabulary: Tensor | None, everything: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TARGETS[kind]()
    head = tiny_head(target).reduce_vocabulary(vocabulary)
    trainer = tiny_trainer(tmp_path, head, target, ROWS)
    trainer.evaluates = everything
    batch = batch_of(ROWS, head.draft_length, 6)
    logits, (features, goals) = whole_logits(target, batch), taught(trainer, batch)
    assert 0 < len(goals.places) < logits.shape[0]
    wanted = logits[goals.places]
    torch.testing.assert_close(goals.logits, wanted if vocabulary is None else wanted[:, vocabulary], **CLOSE)
    assert (goals.best is not None) == everything
    if everything:
        assert torch.equal(goals.best, as_columns(wanted.argmax(-1), vocabulary, len(SOME)))
    if everything and vocabulary is not None:
        rest = [token for token in range(VOCABULARY) if token not in vocabulary]
        torch.testing.assert_close(goals.others, wanted[:, rest].logsumexp(-1), **CLOSE)
        assert (goals.best == len(SOME)).any()
        assert (goals.best < len(SOME)).any()
    monkeypatch.setattr(teacher, "_HELD", 1)  # row by row
    again, one_by_one = taught(trainer, batch)
    torch.testing.assert_close(again, features, **CLOSE)
    torch.testing.assert_close(one_by_one.logits, goals.logits, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("loss", ["dart", "lk", "left_to_right", "dpace", "tv"])
@pytest.mark.parametrize("kind", ["plain", "softcapped"])
def test_losses_and_figures_are_those_of_whole_distributions(kind: str, loss: str, tmp_path: Path) -> None:
    """The reference holds all logits of all tokens, those of drafts spread over the whole vocabulary."""
    target = TARGETS[kind]()
    head = tiny_head(target).reduce_vocabulary(SOME)
    trainer = tiny_trainer(tmp_path, head, target, ROWS, loss=loss)
    batch = batch_of(ROWS, head.draft_length, 6)
    own, drafts = trainer.summed_loss(head, dict(batch))
    logits = whole_logits(target, batch)[drafts.places]  # [N, d, V]
    labels = torch.full_like(drafts.labels, NO_LABEL)
    for column, token in enumerate(SOME):
        labels[drafts.labels == token] = column
    assert (labels == NO_LABEL).sum() > (drafts.labels == NO_LABEL).sum()
    drafted, wanted = head.logits(drafts.hidden), logits[..., SOME]
    acceptance = torch.minimum(drafted.softmax(-1), wanted.softmax(-1)).sum(-1).mean(0)
    reference = trainer.args.objective(drafted, wanted, labels, acceptance)
    torch.testing.assert_close(own, reference.sum(), **CLOSE)

    trainer.evaluates = True
    _, drafts = trainer.summed_loss(head, dict(batch))
    # Drafts that are good in half of the blocks, and text that some of them agree with.
    states: list[Tensor] = []
    with target.lm_head.register_forward_pre_hook(lambda module, given: states.append(given[0].flatten(0, 1))):
        whole_logits(target, batch)
    hidden = torch.where(torch.arange(len(labels))[:, None, None] % 2 == 0, drafts.hidden, states[0][drafts.places])
    everywhere = spread(head.logits(hidden), SOME, VOCABULARY)
    best = logits.argmax(-1)
    labels = torch.where((best == everywhere.argmax(-1)) & (drafts.labels != NO_LABEL), best, drafts.labels)
    drafts = replace(drafts, hidden=hidden, labels=labels)
    by_hand = count_drafts(everywhere, logits, labels)
    found = counts_by_row(head, drafts, 5)
    torch.testing.assert_close(found.sum(0), by_hand.float().sum(0), rtol=1e-5, atol=1e-5)
    assert (by_hand.sum(0)[[0, 2, 3]] > 0).all()


@pytest.mark.parametrize("size", [1000, None], ids=["draft vocabulary", "all tokens"])
def test_memory_does_not_grow_with_text_and_vocabulary(
    size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step and an evaluation over 262,144 tokens, of 2 x 300 tokens: no tensor as large as 5 % of all logits."""
    vocabulary = 262_144
    target = tiny_target(vocab_size=vocabulary, hidden_size=16, num_hidden_layers=1, head_dim=4)
    head = tiny_head(target, feature_layers=[0, 1])
    head.reduce_vocabulary(None if size is None else torch.arange(size))
    rows = token_rows([[300], [200, 100]])
    trainer = tiny_trainer(tmp_path, head, target, rows, rows, anchors_per_row=3, loss_chunk=2)
    batch = batch_of(rows, head.draft_length, 3)
    target.requires_grad_(False)
    holders, layer = set[int](), LMHeadRows.layer  # of rows of the LM head
    monkeypatch.setattr(LMHeadRows, "layer", lambda own, *given: holders.add(id(own)) or layer(own, *given))
    taught(trainer, batch)  # the target is tried out once
    table = target.lm_head.weight.untyped_storage().data_ptr()  # of which operators return views
    step, evaluation = (Largest(lambda one: one.untyped_storage().data_ptr() != table) for _ in range(2))
    with step:
        trainer.compute_loss(head, dict(batch)).backward()
    with evaluation:
        trainer.prediction_step(head, dict(batch), prediction_loss_only=False)
    whole, blocks = vocabulary * batch["input_ids"].numel(), vocabulary * (batch["anchors"] >= 0).sum()
    assert max(step.elements, evaluation.elements) <= blocks * head.draft_length < 0.05 * whole
    if size is not None:
        assert len(holders) == 1
        assert step.elements < vocabulary
