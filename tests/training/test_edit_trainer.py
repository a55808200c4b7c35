"""Training of edit passes: the same pass as at inference, what its slots hold, what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_training import LENGTHS, VOCABULARY, batch_of, tiny_head, tiny_target, tiny_trainer, token_rows
from torch import Tensor

from hf_dart import DartHead
from hf_dart.training import EditTrainer, EditTrainingArguments
from hf_dart.training.objective.blocks import build_blocks, labels_after, target_positions
from hf_dart.training.objective.losses import NO_LABEL
from hf_dart.training.trainers.edit import coupled_draft
from hf_dart.training.trainers.evaluate import DraftQuality

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SHAPES = [
    {},
    {"num_layers": 2, "inject_features": True},
    {"mask_mode": "peagle", "mask_token_id": 1},
    {"input_form": "stream", "num_layers": 2},
    {"block_attention": "bidirectional"},
    {"draft_vocabulary": range(0, VOCABULARY, 2)},
]


def editing_head(target: Any, **config: Any) -> DartHead:
    head = tiny_head(target, editor=True, **config)
    weight = head.editor.correction.weight
    weight.data = torch.eye(len(weight), dtype=weight.dtype).roll(1, 0)
    return head


def trainer_of(folder: Path, head: DartHead, target: Any, rows: Any = None, **options: Any) -> EditTrainer:
    rows = rows or token_rows(LENGTHS)
    return tiny_trainer(folder, head, target, rows, eval_rows=rows, kind=EditTrainer, **options)


def drawn(trainer: EditTrainer, seed: int = 0) -> dict[str, Any]:
    inputs = batch_of(token_rows(LENGTHS), trainer.drafter.draft_length, 6)
    trainer.draw(inputs, torch.Generator().manual_seed(seed))
    return inputs


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training_pass_is_the_pass_of_inference(shape: dict[str, Any], tmp_path: Path) -> None:
    """The head's own drafts through two passes."""
    target = tiny_target(torch.float64)
    head = editing_head(target, **shape)
    shares = {"true_share": 0, "sampled_share": 0, "revealed_share": 0}
    trainer = trainer_of(tmp_path, head, target, edit_passes=2, **shares)
    inputs = drawn(trainer)
    ids, documents, anchors = inputs["input_ids"], inputs["documents"], inputs["anchors"]
    features, target_logits = trainer.teach(ids, documents)
    first = trainer.block_states(head, inputs, features, target_logits)
    assert (anchors >= 0).sum() > 10
    for row, block in (anchors >= 0).nonzero().tolist():
        anchor = int(anchors[row, block])
        begin = int((documents[row] == documents[row, anchor]).nonzero()[0])
        known = slice(begin, anchor + 1)
        behind = ids[row, begin + 1 : anchor + 2]
        state = head.begin(1, 8)
        proposal = head.propose(state, features[row, None, known], behind[None], torch.tensor([len(behind)]))
        torch.testing.assert_close(first[row, block], proposal.hidden[0], **CLOSE)
        again = proposal
        for states in inputs["edited"]:
            columns = again.logits.argmax(-1)
            tokens = columns if proposal.vocabulary is None else proposal.vocabulary[columns]
            again = head.refine(state, proposal, tokens)
            torch.testing.assert_close(states[row, block], again.hidden[0], **CLOSE)


@torch.no_grad()
def test_what_slots_hold(tmp_path: Path) -> None:
    target = tiny_target(torch.float64)
    head = editing_head(target)
    count = head.draft_length - 1

    def slots(**options: Any) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Held, drafted and true tokens [N, d - 1]."""
        trainer = trainer_of(tmp_path, head, target, **options)
        inputs = drawn(trainer)
        features, target_logits = trainer.teach(inputs["input_ids"], inputs["documents"])
        trainer.block_states(head, inputs, features, target_logits)
        present = inputs["anchors"] >= 0
        blocks = build_blocks(inputs["documents"], inputs["anchors"], head.draft_length)
        states = head(
            features=features[:, :-1],
            next_embeddings=head.embed(inputs["input_ids"][:, 1:]),
            positions=blocks.positions,
            attention_mask=blocks.mask,
        )
        found, after = (
            trainer._slots(inputs, target_logits.flatten(0, 1), number, states).unflatten(1, (-1, count))[present]
            for number in (1, 2)
        )
        greedy = states[:, features.shape[1] - 1 :].unflatten(1, (-1, count))[present]
        anchor = states[:, : features.shape[1] - 1].gather(
            1, inputs["anchors"].clamp(min=0)[..., None].expand(-1, -1, states.shape[-1])
        )[present]
        drafted = head.logits(torch.cat([anchor[:, None], greedy], dim=1)[:, :-1]).argmax(-1)
        rows = present.nonzero()[:, :1]
        truth = inputs["input_ids"][rows, target_positions(inputs["anchors"][present], count + 1)[:, 1:]]
        assert torch.equal(after, truth)  # the pass after all edit passes, of evaluations
        return found, drafted, truth, inputs

    found, drafted, truth, _ = slots(true_share=0, sampled_share=0, revealed_share=0)
    assert torch.equal(found, drafted)
    assert not torch.equal(drafted, truth)
    found, drafted, truth, inputs = slots(true_share=0.5, sampled_share=0, revealed_share=0)
    known = inputs["true"][inputs["anchors"] >= 0][:, None]
    assert torch.equal(found, torch.where(known, truth, drafted))
    assert known.any()
    assert not known.all()
    found, drafted, truth, inputs = slots(sampled_share=1, revealed_share=1)
    masked = inputs["masked"][inputs["anchors"] >= 0][:, :-1]
    assert torch.equal(found, torch.where(masked, -1, truth))
    assert masked.any()
    assert not masked.all()
    found, drafted, truth, _ = slots(true_share=1, revealed_share=0)
    assert torch.equal(found, truth)
    found, drafted, truth, _ = slots(true_share=0, sampled_share=1, revealed_share=0)
    assert not torch.equal(found, drafted)


def test_coupled_draft_shares_the_noise() -> None:
    """Drafts after a known choice of the target are as drafts and choices of one noise are."""
    generator = torch.Generator().manual_seed(0)
    draft, target = torch.randn(2, 5, generator=generator)
    count = 200_000
    noise = torch.empty(count, 5).exponential_(generator=generator)
    chosen = (target.softmax(-1) / noise).argmax(-1)
    together = (draft.softmax(-1) / noise).argmax(-1)
    again = coupled_draft(
        draft.expand(count, 1, 5), target.expand(count, 1, 5), chosen[:, None], torch.Generator().manual_seed(1)
    )[:, 0]
    wanted = torch.zeros(5, 5).index_put_((chosen, together), torch.tensor(1 / count), accumulate=True)
    found = torch.zeros(5, 5).index_put_((chosen, again), torch.tensor(1 / count), accumulate=True)
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-3)
    alike = coupled_draft(
        target.expand(count, 1, 5), target.expand(count, 1, 5), chosen[:, None], torch.Generator().manual_seed(1)
    )[:, 0]
    assert torch.equal(alike, chosen)


@pytest.mark.parametrize("options", [{"edit_passes": 2}, {"editor_only": True}], ids=["joint", "editor only"])
def test_training(options: dict[str, Any], tmp_path: Path) -> None:
    """Tokens after known ones become likelier than by the first draft, and metrics say so."""
    target = tiny_target()
    head = tiny_head(target).add_editor()
    before = {name: weight.clone() for name, weight in head.named_parameters()}
    trainer = trainer_of(tmp_path, head, target, token_rows([[24]] * 8), max_steps=16, loss_chunk=16, **options)
    start = trainer.evaluate()
    assert start["eval_tau_pass_1"] == start["eval_tau"]
    assert start["eval_tau_sampled_edited"] == start["eval_tau_sampled"]
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_tau_sampled_edited"] > metrics["eval_tau_sampled"]
    assert ("eval_tau_pass_2" in metrics) == ("edit_passes" in options)
    timed = {"eval_runtime", "eval_model_preparation_time", "eval_samples_per_second", "eval_steps_per_second", "epoch"}
    named = {f"eval_{name}" for name in trainer.args.metric_names(head.draft_length)}
    assert set(metrics) <= named | timed
    moved = {name for name, weight in head.named_parameters() if not torch.equal(weight, before[name])}
    assert "editor.correction.weight" in moved
    assert "editor.fc.weight" in moved
    assert all(name.startswith("editor") for name in moved) == bool(options.get("editor_only"))


def test_metrics_are_those_of_their_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first drafts, of each pass, and of the one over true tokens."""
    target = tiny_target()
    trainer = trainer_of(tmp_path, editing_head(target), target, edit_passes=2)
    taus = iter((1.5, 2.5, 3.5, 4.5))

    def metrics(quality: DraftQuality) -> dict[str, float]:
        tau = next(taus)
        return {"tau": tau, "tau_sampled": tau + 10}

    monkeypatch.setattr(DraftQuality, "metrics", metrics)
    found = {name: value for name, value in trainer.evaluate().items() if "tau" in name}
    expected = {"tau": 1.5, "tau_sampled": 11.5, "tau_pass_1": 2.5, "tau_pass_2": 3.5, "tau_sampled_edited": 14.5}
    assert found == {f"eval_{name}": value for name, value in expected.items()}


def test_revealed_blocks_learn_what_is_masked(tmp_path: Path) -> None:
    """The true tokens of slots that are not masked are held, and the others learned."""
    target = tiny_target(torch.float64)
    head = editing_head(target)
    trainer = trainer_of(tmp_path, head, target, loss_chunk=0, revealed_share=1.0, editor_only=True)
    inputs = drawn(trainer)
    loss = trainer.summed_loss(head, inputs)[0]
    times, masked = inputs["times"], inputs["masked"]
    assert loss > 0
    present = inputs["anchors"] >= 0
    hidden = inputs["edited"][0][present]
    rows = present.nonzero()[:, :1]
    places = target_positions(inputs["anchors"][present], head.draft_length)
    labels = labels_after(inputs["input_ids"], inputs["documents"], rows, places)
    surprise = -head.logits(hidden).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    counted = masked[present] & (labels != NO_LABEL)
    by_hand = (torch.where(counted, surprise, 0).mean(-1) / times[present]).sum()
    torch.testing.assert_close(loss, by_hand, rtol=1e-6, atol=0)  # times are in float32


def test_refusals(tmp_path: Path) -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match="Edit passes go with shifted logits"):
        trainer_of(tmp_path, tiny_head(target, shift_logits=False), target)
    for options, message in (
        ({"edit_passes": 0}, "edit_passes is 0; give 1 or more"),
        ({"true_share": 2}, "true_share is 2; give a number from 0 to 1"),
        ({"selector_only": True}, "trained apart"),
    ):
        with pytest.raises(ValueError, match=message):
            EditTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)


def test_noise_is_drawn_for_sampled_blocks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, sizes, devices = tiny_target(), [], set()

    def watched(draft: Any, wanted: Any, labels: Any, generator: torch.Generator) -> Any:
        sizes.append((tuple(draft.shape), tuple(wanted.shape)))
        devices.add((generator.device.type, draft.device.type))
        return coupled_draft(draft, wanted, labels, generator)

    monkeypatch.setattr("hf_dart.training.trainers.edit.coupled_draft", watched)
    arguments: dict[str, Any] = {"output_dir": str(tmp_path), "max_steps": 1, "anchors_per_row": 20, "use_cpu": True}
    arguments |= {"report_to": "none", "save_strategy": "no", "per_device_train_batch_size": 2, "loss_chunk": 64}
    arguments |= {"sampled_share": 0.3, "true_share": 0.0}
    head = tiny_head(target).add_editor()
    EditTrainer(head, target, EditTrainingArguments(**arguments), train_dataset=token_rows([[40]] * 2)).train()
    assert devices == {("cpu", "cpu")}
    assert sizes
    for draft, wanted in sizes:
        assert draft == wanted
        assert 0 < draft[0] < 25  # of 40 blocks, three in ten
        assert draft[1:] == (head.draft_length - 1, VOCABULARY)
