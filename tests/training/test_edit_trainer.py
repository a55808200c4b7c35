"""Training of edit passes: the same pass as at inference, what its slots hold, what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_training import ROWS, batch_of, changed, copies, taught, tiny_head, tiny_target, tiny_trainer
from torch import Tensor

from hf_dart import DartHead
from hf_dart.training import EditTrainer, EditTrainingArguments
from hf_dart.training.trainers.drafts import places_and_labels
from hf_dart.training.trainers.edit import coupled_draft

TARGET = tiny_target(torch.float64)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
OWN = {"true": 0.0, "sampled": 0.0}  # shares of the blocks: all hold the head's own draft
SHAPES = [
    {},
    {"num_layers": 2},
    {"mask_mode": "peagle", "mask_token_id": 1},
    {"input_form": "stream", "num_layers": 2},
    {"block_attention": "bidirectional"},
    {"draft_vocabulary": range(0, TARGET.config.vocab_size, 2)},
]


def editing_head(target: Any, **config: Any) -> DartHead:
    head = tiny_head(target, editor=True, **config)
    weight = head.editor.correction.weight
    weight.data = torch.eye(len(weight), dtype=weight.dtype).roll(1, 0)
    return head


def trainer_of(folder: Path, head: DartHead, shares: dict[str, float] | None = None, **options: Any) -> EditTrainer:
    trainer = tiny_trainer(folder, head, TARGET, ROWS, ROWS, kind=EditTrainer, **options)
    for name, share in (shares or {}).items():
        setattr(trainer, f"{name}_share", share)
    return trainer


@torch.no_grad()
def passes(trainer: EditTrainer) -> tuple[dict[str, Any], Tensor, Tensor, Tensor, Tensor]:
    """A batch, features, and hidden states of the first drafts; tokens that slots hold in the edit pass, true ones."""
    inputs = batch_of(ROWS, trainer.drafter.draft_length, 6)
    trainer.draw(inputs, torch.Generator().manual_seed(0))
    held: list[Tensor] = []
    slots = trainer._slots
    trainer._slots = lambda *args: held.append(slots(*args)) or held[-1]  # type: ignore[method-assign]
    features, goals = taught(trainer, inputs)
    first = trainer.block_states(trainer.drafter, inputs, features, goals)
    present, count = inputs["anchors"] >= 0, trainer.drafter.draft_length
    truth = inputs["input_ids"].flatten()[places_and_labels(inputs, count)[0][:, 1:]]
    return inputs, features, first, held[0].unflatten(1, (-1, count - 1))[present], truth


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training_pass_is_the_pass_of_inference(shape: dict[str, Any], tmp_path: Path) -> None:
    head = editing_head(TARGET, **shape)
    inputs, features, first, *_ = passes(trainer_of(tmp_path, head, OWN))
    ids, documents, anchors = inputs["input_ids"], inputs["documents"], inputs["anchors"]
    assert (anchors >= 0).sum() > 10
    for row, block in (anchors >= 0).nonzero().tolist():
        anchor = int(anchors[row, block])
        begin = int((documents[row] == documents[row, anchor]).nonzero()[0])
        following = ids[row, begin + 1 : anchor + 2]
        state = head.begin(1, 8)
        known = features[row, None, begin : anchor + 1]
        proposal = head.propose(state, known, following[None], torch.tensor([len(following)]))
        torch.testing.assert_close(first[row, block], proposal.hidden[0], **CLOSE)
        columns = proposal.logits.argmax(-1)
        tokens = columns if proposal.vocabulary is None else proposal.vocabulary[columns]
        again = head.refine(state, proposal, tokens)
        torch.testing.assert_close(inputs["edited"][row, block], again.hidden[0], **CLOSE)


@torch.no_grad()
def test_what_slots_hold(tmp_path: Path) -> None:
    head = editing_head(TARGET)

    def slots(**shares: float) -> tuple[Tensor, Tensor, Tensor, dict[str, Any], Tensor]:
        """Held, drafted and true tokens [N, d - 1]."""
        inputs, _, first, held, truth = passes(trainer_of(tmp_path, head, {**OWN, **shares}))
        present = inputs["anchors"] >= 0
        return held, head.logits(first[present][:, :-1]).argmax(-1), truth, inputs, present

    found, drafted, truth, *_ = slots()
    assert torch.equal(found, drafted)
    assert not torch.equal(drafted, truth)
    found, drafted, truth, inputs, present = slots(true=0.5)
    known = inputs["true"][present][:, None]
    assert torch.equal(found, torch.where(known, truth, drafted))
    assert known.any()
    assert not known.all()
    found, _, truth, *_ = slots(true=1)
    assert torch.equal(found, truth)
    found, drafted, *_ = slots(sampled=1)
    assert not torch.equal(found, drafted)


def test_coupled_draft_shares_the_noise() -> None:
    """Drafts after a known choice of the target are as drafts and choices of one noise are."""
    generator = torch.Generator().manual_seed(0)
    draft, target = torch.randn(2, 5, generator=generator)
    count = 200_000
    noise = torch.empty(count, 5).exponential_(generator=generator)
    chosen = (target.softmax(-1) / noise).argmax(-1)
    together = (draft.softmax(-1) / noise).argmax(-1)

    def drafted(logits: Tensor) -> Tensor:
        own, wanted = (one.expand(count, 1, 5) for one in (logits, target))
        return coupled_draft(own, wanted, chosen[:, None], torch.Generator().manual_seed(1))[:, 0]

    wanted = torch.zeros(5, 5).index_put_((chosen, together), torch.tensor(1 / count), accumulate=True)
    found = torch.zeros(5, 5).index_put_((chosen, drafted(draft)), torch.tensor(1 / count), accumulate=True)
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-3)
    assert torch.equal(drafted(target), chosen)


@pytest.mark.parametrize("editor_only", [False, True])
def test_training(editor_only: bool, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, tiny_head(TARGET), max_steps=16, loss_chunk=16, editor_only=editor_only)
    start, before = trainer.evaluate(), copies(trainer.drafter)
    assert start["eval_tau_edited"] == start["eval_tau"]  # an untrained editor changes nothing
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < start["eval_loss"]
    moved = changed(trainer.drafter, before)
    assert {"editor.correction.weight", "editor.fc.weight"} <= moved
    assert all(name.startswith("editor") for name in moved) == editor_only


def test_metrics_and_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taus = iter((1.5, 2.5))
    monkeypatch.setattr("hf_dart.training.trainers.evaluation.draft_figures", lambda counts: {"tau": next(taus)})
    found = trainer_of(tmp_path, editing_head(TARGET)).evaluate()
    assert (found["eval_tau"], found["eval_tau_edited"]) == (1.5, 2.5)  # of the passes in their order
    with pytest.raises(ValueError, match="Edit passes go with shifted logits"):
        trainer_of(tmp_path, tiny_head(TARGET, shift_logits=False))
    with pytest.raises(ValueError, match="trained apart"):
        EditTrainingArguments(output_dir=str(tmp_path), use_cpu=True, selector_only=True)
