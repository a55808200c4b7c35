"""What runs of training do where rows are empty, and where they are resumed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_training import VOCABULARY, tiny_head, tiny_target, tiny_trainer, token_rows
from transformers import TrainerCallback

from hf_dart.training.trainers.edit import EditTrainer, EditTrainingArguments, coupled_draft


class Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def masked(rows: list[dict[str, Any]], learned: bool) -> list[dict[str, Any]]:
    return [{**row, "loss_mask": torch.full((len(row["input_ids"]),), learned)} for row in rows]


def test_a_resumed_run_is_as_patient_as_the_run(tmp_path: Path) -> None:
    target, rows = tiny_target(), token_rows([[24]] * 4)

    def steps(folder: str, stop: int | None = None, resume: str | None = None) -> int:
        options: dict[str, Any] = {"early_stopping_patience": 3, "learning_rate": 0.0, "max_steps": 20}
        options |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        trainer = tiny_trainer(tmp_path / folder, tiny_head(target), target, rows, rows[:1], **options)
        if stop is not None:
            trainer.add_callback(Stop(stop))
        with suppress(KeyboardInterrupt):
            trainer.train(resume_from_checkpoint=resume)
        return trainer.state.global_step

    whole = steps("whole")
    assert whole == 4  # one that sets the mark, and three that are no better
    assert steps("part", stop=3) == 3
    assert steps("part", resume=str(tmp_path / "part" / "checkpoint-3")) == whole


@pytest.mark.parametrize("chunk", [64, 0])
def test_a_selector_learns_nothing_from_rows_without_blocks(tmp_path: Path, chunk: int) -> None:
    target = tiny_target()
    rows = masked(token_rows([[24]] * 2), False) + masked(token_rows([[24]] * 2), True)
    options: dict[str, Any] = {"selector_only": True, "selector_candidates": 4, "loss_chunk": chunk, "max_steps": 4}
    head = tiny_head(target).add_selector(4)
    trainer = tiny_trainer(tmp_path, head, target, rows, rows, per_device_train_batch_size=1, **options)
    before = {name: weight.clone() for name, weight in head.selector.state_dict().items()}
    trainer.train()
    assert any(not torch.equal(weight, before[name]) for name, weight in head.selector.state_dict().items())
    assert trainer.evaluate()["eval_loss"] > 0


def test_rows_without_blocks_leave_the_loss_as_it_is(tmp_path: Path) -> None:
    target = tiny_target()
    rows = masked(token_rows([[24], [8, 16], [6, -18]]), True)
    for size in (1, 2, 4):
        options = {"per_device_eval_batch_size": size, "anchors_per_row": 30}
        trainer = tiny_trainer(tmp_path, tiny_head(target), target, rows, **options)
        found = trainer.evaluate(rows)["eval_loss"]
        if size == 1:
            expected = found  # of blocks, though rows have different numbers of them
        assert found == pytest.approx(expected, rel=1e-5)
        empty = masked(token_rows([[24]] * 3), False)
        assert trainer.evaluate([*empty, *rows])["eval_loss"] == pytest.approx(expected, rel=1e-5)


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
