"""Training on a stream that is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.chats import chat_tokenizer
from support.tiny_training import VOCABULARY, tiny_head, tiny_target, tiny_trainer, write_json_lines

from hf_dart.training import DataArguments, load_rows


def write_sources(folder: Path) -> list[str]:
    random = np.random.default_rng(0)
    names = []
    for part in range(2):
        rows = [{"input_ids": random.integers(2, VOCABULARY, size).tolist()} for size in random.integers(6, 30, 20)]
        names.append(write_json_lines(folder / f"{part}.jsonl", rows))
    return names


def stream(names: list[str]) -> Any:
    arguments = DataArguments(names, shares=[0.3, 0.7], streaming=True, max_length=24)
    return load_rows(arguments, chat_tokenizer(None), 4)[0]


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.matrix), 9])
def test_a_resumed_run_on_a_stream_is_the_run(tmp_path: Path, step: int) -> None:
    """Within the first pass through the documents, and after it."""
    names, weights = write_sources(tmp_path), []
    for resume in (False, True):
        target = tiny_target()
        head = tiny_head(target)
        folder = tmp_path / "run"
        options = {"per_device_train_batch_size": 8, "max_steps": 11, "save_strategy": "steps", "save_steps": step}
        trainer = tiny_trainer(folder, head, target, stream(names), **options)
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}") if resume else None)
        assert trainer.state.global_step == 11
        weights.append(head.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name])
