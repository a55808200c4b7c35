"""Training that is killed, diverges or finds the disk full: what was saved before is whole, and runs go on from it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scripts import command, environment
from support.tiny_training import LENGTHS, tiny_head, tiny_target, tiny_trainer, token_rows
from torch import Tensor

from hf_dart import DartHead
from hf_dart.training import DartTrainer
from hf_dart.training.checkpoints.folders import STAGING

ROWS = token_rows(LENGTHS * 4)
STEPS = 6


def trainer_of(folder: Path, **arguments: Any) -> DartTrainer:
    target = tiny_target()
    fields = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    fields |= {"lr_scheduler_type": "constant"}  # whatever max_steps is
    return tiny_trainer(folder, tiny_head(target), target, ROWS, **{**fields, **arguments})


def uninterrupted(folder: Path) -> dict[str, Tensor]:
    trainer = trainer_of(folder, save_strategy="no")
    trainer.train()
    return trainer.drafter.state_dict()


def assert_equal(weights: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


def checkpoints(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith("checkpoint")}


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(__file__, str(folder), *words), env=environment())


def test_killed_while_it_saves(tmp_path: Path) -> None:
    """The weights and the optimizer of step 4 were written, the rest was not: step 2 is the newest checkpoint."""
    folder = tmp_path / "run"
    assert start(folder, "4").wait(timeout=300) == -signal.SIGKILL
    half = folder / STAGING / "checkpoint-4"
    assert (half / "model.safetensors").is_file()
    assert checkpoints(folder) == {"checkpoint-2"}

    trainer = trainer_of(folder)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS
    assert checkpoints(folder) == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    assert not (folder / STAGING).exists()
    assert_equal(uninterrupted(tmp_path / "other"), trainer.drafter.state_dict())


@pytest.mark.matrix
def test_killed_at_any_time(tmp_path: Path) -> None:
    """Again and again, a little later each time, with a checkpoint at every step."""
    folder = tmp_path / "run"
    begun = 0
    for _ in range(12):
        process = start(folder, "never", "1")
        while not checkpoints_beyond(folder, begun) and process.poll() is None:
            time.sleep(0.003)
        time.sleep(0.01 * begun)
        process.kill()
        process.wait()
        found = sorted(int(name.removeprefix("checkpoint-")) for name in checkpoints(folder))
        begun = found[-1]
        for step in found:
            DartHead.from_pretrained(str(folder / f"checkpoint-{step}"), target=tiny_target())
        if begun == STEPS:
            break
    trainer = trainer_of(folder, save_steps=1)
    trainer.train(resume_from_checkpoint=True)
    assert_equal(uninterrupted(tmp_path / "other"), trainer.drafter.state_dict())


def checkpoints_beyond(folder: Path, step: int) -> bool:
    return folder.is_dir() and any(int(name.removeprefix("checkpoint-")) > step for name in checkpoints(folder))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: writing fails as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_checkpoint_that_does_not_fit_leaves_nothing_behind(tmp_path: Path, file: str) -> None:
    trainer_of(tmp_path, max_steps=2).train()
    saved = {path: path.read_bytes() for path in (tmp_path / "checkpoint-2").rglob("*") if path.is_file()}
    trainer = trainer_of(tmp_path)
    size = (tmp_path / "checkpoint-2" / file).stat().st_size
    with largest_file(size - 1), pytest.raises(OSError, match=r"checkpoint-4 could not be written .* make room"):
        trainer.train(resume_from_checkpoint=True)
    assert {path: path.read_bytes() for path in (tmp_path / "checkpoint-2").rglob("*") if path.is_file()} == saved
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]

    trainer = trainer_of(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert_equal(uninterrupted(tmp_path / "other"), trainer.drafter.state_dict())
    with largest_file(1000), pytest.raises(OSError, match="final could not be written"):
        trainer.save_whole(tmp_path / "final")
    assert not (tmp_path / "final").exists()
    trainer.save_whole(tmp_path / "final")
    loaded = DartHead.from_pretrained(str(tmp_path / "final"), target=trainer.target)
    assert_equal(loaded.state_dict(), trainer.drafter.state_dict())


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    """As soon as a step has thrown the weights out of range."""
    trainer = trainer_of(tmp_path, save_steps=1, learning_rate=1e30, lr_scheduler_type="linear", warmup_steps=2)
    with pytest.raises(FloatingPointError, match=r"loss of step 3 is nan; .*lower learning_rate"):
        trainer.train()
    DartHead.from_pretrained(str(tmp_path / "checkpoint-1"), target=trainer.target)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, save_steps=1, max_grad_norm=0.0)
    trainer.drafter.fc.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(FloatingPointError, match="after step 1, and are not saved"):
        trainer.train()
    assert not list(tmp_path.iterdir())


def test_rows_that_hold_no_block(tmp_path: Path) -> None:
    target = tiny_target()
    short = token_rows([[4, 4, 3], [2, 2, 2, 5]])
    trainer = tiny_trainer(tmp_path, tiny_head(target, draft_length=6), target, short, max_steps=20)
    with pytest.raises(ValueError, match="nothing to train on"):
        trainer.train()
    with pytest.raises(ValueError, match="nothing to evaluate"):
        trainer.evaluate(short)


def main(folder: str, dies_at: str, save_steps: str = "2") -> None:
    """Train, on from the newest checkpoint; die while the checkpoint of a step is written."""

    class Dying(DartTrainer):
        def _save_rng_state(self, output_dir: str) -> None:
            if str(self.state.global_step) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            super()._save_rng_state(output_dir)

    trainer = trainer_of(Path(folder), save_steps=int(save_steps))
    trainer.__class__ = Dying
    trainer.train(resume_from_checkpoint=bool(Path(folder).is_dir() and checkpoints(Path(folder))))


if __name__ == "__main__":
    main(*sys.argv[1:])
