"""Rows in which nothing can be drafted: they change neither the loss nor its mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_training import tiny_head, tiny_target, tiny_trainer, token_rows


def masked(rows: list[dict[str, Any]], learned: bool) -> list[dict[str, Any]]:
    return [{**row, "loss_mask": torch.full((len(row["input_ids"]),), learned)} for row in rows]


@pytest.mark.parametrize("chunk", [64, 0])
def test_a_selector_learns_nothing_from_rows_without_blocks(tmp_path: Path, chunk: int) -> None:
    target = tiny_target()
    rows = masked(token_rows([[24]] * 2), False) + masked(token_rows([[24]] * 2), True)
    options: dict[str, Any] = {"selector_only": True, "loss_chunk": chunk, "max_steps": 4}
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
