"""Training on a stream: resumed, and shared by processes."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.chats import chat_tokenizer
from support.scripts import command, environment
from support.tiny_training import VOCABULARY, tiny_head, tiny_target, tiny_trainer

from hf_dart.training import DataArguments, load_rows


def write_sources(folder: Path) -> list[str]:
    random = np.random.default_rng(0)
    names = []
    for part in range(2):
        rows = [{"input_ids": random.integers(2, VOCABULARY, size).tolist()} for size in random.integers(6, 30, 20)]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        names.append(str(folder / f"{part}.jsonl"))
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


@pytest.mark.matrix
def test_processes_share_a_stream(tmp_path: Path) -> None:
    names = write_sources(tmp_path)
    whole = [row["input_ids"].tolist() for row in islice(stream(names), 64)]
    subprocess.run(command(__file__, str(tmp_path), *names, processes=2), check=True, timeout=300, env=environment())
    parts = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]
    seen = [row for step in zip(*parts, strict=True) for part in step for row in part]
    assert seen == whole


def one_share(folder: str, *names: str) -> None:
    """The rows that one process trains on."""
    target = tiny_target()
    trainer = tiny_trainer(Path(folder) / "run", tiny_head(target), target, stream(list(names)))
    batches = [batch["input_ids"].tolist() for batch in islice(trainer.get_train_dataloader(), 8)]
    Path(folder, f"seen-{trainer.args.process_index}.json").write_text(json.dumps(batches))


if __name__ == "__main__":
    one_share(*sys.argv[1:])
