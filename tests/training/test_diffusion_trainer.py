"""Training a diffusion drafter: the blocks of the shared pass, what is masked in them, the losses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_training
from support.heads import one_pass
from support.tiny_training import ROWS, taught, token_rows
from torch import Tensor
from transformers import default_data_collator

from hf_dart import DiffusionDrafter
from hf_dart.drafters.diffusion.drafter import MASK
from hf_dart.training import DiffusionTrainer
from hf_dart.training.objective.losses import NO_LABEL, cross_entropy
from hf_dart.training.trainers.diffusion import draw_times
from hf_dart.training.trainers.drafts import places_and_labels
from hf_dart.training.trainers.trainer import seeded


def tiny_drafter(target: Any, **config: Any) -> DiffusionDrafter:
    fields = {"draft_length": 4, "initializer_range": 0.2, "context_window": 24}
    return DiffusionDrafter.from_target(target, **{**fields, **config})


trainer_on = partial(tiny_training.trainer_on, head=tiny_drafter, kind=DiffusionTrainer)


def drawn_batch(trainer: Any, rows: list[dict[str, Tensor]], seed: int = 0) -> dict[str, Tensor]:
    batch = default_data_collator(rows)
    trainer.draw(batch, seeded(seed))
    return batch


@torch.no_grad()
@pytest.mark.parametrize("kind", [{}, {"feature_layers": [1, 3]}], ids=["text", "features"])
@pytest.mark.parametrize(("window", "text_weight"), [(6, 0.0), (24, 0.0), (24, 1.0)])
def test_every_block_is_trained_as_it_is_drafted(
    tmp_path: Path, kind: dict[str, Any], window: int, text_weight: float
) -> None:
    options = {"anchors_per_row": 9, "loss_chunk": 0, "text_weight": text_weight, "dtype": torch.float64}
    trainer = trainer_on(tmp_path, [], head=partial(tiny_drafter, context_window=window, **kind), **options)
    drafter, batch = trainer.drafter, drawn_batch(trainer, ROWS)
    features, goals = taught(trainer, batch)
    hidden = trainer.block_states(drafter, batch, features, goals)
    blocks = (batch["anchors"] >= 0).nonzero().tolist()
    assert len(blocks) > 15
    for row, block in blocks:
        ids, documents, anchor = (batch[name][row] for name in ("input_ids", "documents", "anchors"))
        end = int(anchor[block]) + 1
        begin = int((documents == documents[end - 1]).nonzero()[0])
        slots = batch["slots"][row, block].tolist()
        expected = one_pass(drafter, features[row, begin:end], ids[begin + 1 : end + 1], slots)
        torch.testing.assert_close(drafter.logits(hidden[row, block]), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_only_what_is_learnt_is_computed(tmp_path: Path, share: float, chunk: int) -> None:
    """The loss of the masked tokens alone, a few at a time, is that of whole blocks; so are its gradients."""
    options = {"anchors_per_row": 12, "loss_chunk": chunk, "revealed_share": share, "dtype": torch.float64}
    trainer = trainer_on(tmp_path, [], **options)
    trainer.target.requires_grad_(False)
    drafter, batch = trainer.drafter, drawn_batch(trainer, ROWS)
    loss, drafts = trainer.summed_loss(drafter, batch)
    present = batch["anchors"] >= 0
    _, labels = places_and_labels(batch, drafter.draft_length)
    masked, times = batch["slots"][present] == MASK, batch["times"][present]
    assert (masked & (labels == NO_LABEL)).any()
    assert (~masked).any()
    logits, shown = drafter.logits(drafts.hidden), times < 1
    whole = (torch.where(masked, cross_entropy(logits, labels), 0).mean(-1) / times)[shown].sum()
    whole = whole + trainer.args.objective(logits, logits, labels)[~shown].sum()
    torch.testing.assert_close(loss, whole, rtol=1e-9, atol=1e-9)
    weights = list(drafter.parameters())
    gradients = [torch.autograd.grad(one, weights, retain_graph=True) for one in (loss, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
    assert all(gradient.abs().sum() > 0 for gradient in gradients[0])


@torch.no_grad()
@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_the_text_teaches_the_first_token_of_a_draft_behind_every_entry(
    tmp_path: Path, chunk: int, masked: bool
) -> None:
    make, batch = partial(tiny_drafter, feature_layers=[1]), default_data_collator(ROWS)
    if masked:
        batch["loss_mask"] = torch.rand(batch["input_ids"].shape, generator=seeded(3)) < 0.7
    results = []
    for weight in (0.0, 2.5):
        options = {"anchors_per_row": 5, "loss_chunk": chunk, "text_weight": weight, "dtype": torch.float64}
        trainer = trainer_on(tmp_path, [], head=make, **options)
        drawn, drafter = dict(batch), trainer.drafter
        blocks = trainer.draw(drawn, seeded(0))
        results.append(trainer.summed_loss(drafter, drawn)[0])
    features, _ = taught(trainer, drawn)
    expected = []
    for row, (ids, documents) in enumerate(zip(batch["input_ids"], batch["documents"], strict=True)):
        for entry in range(len(ids) - 2):
            inside = documents[entry] == documents[entry + 2] >= 0
            if not inside or (masked and not batch["loss_mask"][row, entry + 2]):
                continue
            begin = int((documents == documents[entry]).nonzero()[0])
            text = features[row, begin : entry + 1], ids[begin + 1 : entry + 2]
            expected.append(-one_pass(drafter, *text, [MASK])[0].log_softmax(-1)[ids[entry + 2]])
    difference = 2.5 * blocks * torch.stack(expected).mean()
    torch.testing.assert_close(results[1] - results[0], difference, rtol=1e-8, atol=1e-8)


def test_evaluations_are_of_the_blocks_alone(tmp_path: Path) -> None:
    """Whatever the text weighs: losses of runs compare."""
    rows = ROWS * 2
    trainers = (trainer_on(tmp_path, rows, rows, text_weight=weight) for weight in (0.0, 1.0))
    first, second = (trainer.evaluate()["eval_loss"] for trainer in trainers)
    assert first == second


def test_what_is_masked(tmp_path: Path) -> None:
    """Revealed are true tokens, as many as the times say, which are spread; and the same seed gives the same."""
    trainer = trainer_on(tmp_path, [], anchors_per_row=20, revealed_share=0.75)
    rows = token_rows([[40, 9, 24], [73], [60, -13]] * 3)
    batch = drawn_batch(trainer, rows)
    present, slots, times = batch["anchors"] >= 0, batch["slots"], batch["times"]
    revealed = (slots != MASK) & present[..., None]
    places = batch["anchors"][..., None] + 2 + torch.arange(4)
    true = batch["input_ids"].gather(1, places.flatten(1).clamp(0, 72)).view_as(slots)
    assert torch.equal(slots[revealed], true[revealed])
    assert (times[~present] == 1).all()
    blocks = int(present.sum())
    partial = times[present] < 1
    assert int(partial.sum()) == round(0.75 * blocks)
    assert not revealed[present][~partial].any()
    share, expected = revealed[present][partial].float().mean(), 1 - times[present][partial].mean()
    assert float(share) == pytest.approx(float(expected), abs=0.08)
    again = drawn_batch(trainer, rows)
    assert all(torch.equal(batch[name], again[name]) for name in ("anchors", "times", "slots"))
    assert not torch.equal(slots, drawn_batch(trainer, rows, seed=1)["slots"])
    times = draw_times(10, 1.0, seeded(0)).sort().values
    assert (times > 0).all()
    assert torch.equal((times * 10).long(), torch.arange(10))
    assert torch.equal(draw_times(3, 0.0, seeded(0)), torch.ones(3))
    assert len(draw_times(0, 1.0, seeded(0))) == 0


@pytest.mark.parametrize("loss", ["left_to_right", "dpace", "dart"])
def test_the_target_runs_only_where_it_is_asked(tmp_path: Path, loss: str) -> None:
    """For text alone it does not."""
    runs: list[int] = []
    trainer = trainer_on(tmp_path, ROWS * 4, loss=loss)
    trainer.target.register_forward_pre_hook(lambda *_: runs.append(1))
    trainer.train()
    tries = 3  # of packed rows that are kept apart, and of logits of some tokens beside all
    assert len(runs) == (8 + tries if loss == "dart" else 0)
