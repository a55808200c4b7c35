"""Runs that are killed or find the disk full go on from what was saved, and from checkpoints of their own alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from support import sentences
from support.chats import chat_tokenizer
from support.scripts import command, environment
from support.tiny_training import ROWS, changed, copies, largest_file, tiny_head, trainer_on, write_json_lines

from hf_dart import DartHead, EagleDrafter, TreeConfig
from hf_dart.training import DartTrainer, DataArguments, EagleTrainer, load_rows
from hf_dart.training.checkpoints import check_checkpoint, newest_checkpoint
from hf_dart.training.run import apply_lora
from hf_dart.training.trainers.arguments import LoraArguments

HEAD = ("config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}


def eagle(target: Any) -> EagleDrafter:
    return EagleDrafter.from_target(target, draft_length=4)


def trainer_of(folder: Path, head: Any = None, **arguments: Any) -> Any:
    fields = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    fields["kind"] = EagleTrainer if head is eagle else DartTrainer
    return trainer_on(folder, ROWS * 4, ROWS[:1], head or tiny_head, **{**fields, **arguments})


RUN: dict[str, Any] = {
    "max_steps": 6, "save_steps": 2, "gradient_accumulation_steps": 2, "muon_learning_rate": 1e-2
}  # fmt: skip


def test_a_run_that_did_not_fit_and_one_that_was_killed_go_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Killed while it saved step 4: weights and optimizer were written, the rest was not; step 2 is the newest."""
    folder = tmp_path / "run"
    second, fourth = folder / "checkpoint-2", folder / "checkpoint-4"
    trainer_of(folder, **{**RUN, "max_steps": 2}).train()
    size = (second / "optimizer.pt").stat().st_size
    with largest_file(size - 1), pytest.raises(OSError, match=r"checkpoint-4 could not be written .* make room"):
        trainer_of(folder, **RUN).train(resume_from_checkpoint=True)
    assert [*folder.iterdir()] == [second]

    fourth.mkdir()
    (fourth / "trainer_state.json").write_text("{}")  # of a run that came by here before
    assert newest_checkpoint(folder) == str(fourth)
    process = subprocess.run(command(__file__, str(folder), "4"), env=environment(), timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert (fourth / "model.safetensors").is_file()
    assert newest_checkpoint(folder) == str(second)
    state = (second / "trainer_state.json").read_text()
    (fourth / "trainer_state.json").write_text(state[: len(state) // 2])
    assert newest_checkpoint(folder) == str(second)
    (folder / "checkpoint-of-mine").mkdir()

    trainer, whole = trainer_of(folder, **RUN), trainer_of(tmp_path / "whole", **{**RUN, "save_strategy": "no"})
    trainer.train(resume_from_checkpoint=True)
    assert {path.name for path in folder.iterdir()} == {f"checkpoint-{name}" for name in (2, 4, 6, "of-mine")}
    assert trainer.state.global_step == RUN["max_steps"]
    whole.train()
    assert not changed(trainer.drafter, whole.drafter.state_dict())  # bit for bit


def dying(folder: str, step: str) -> None:
    """Train on, and die while the checkpoint of a step is written."""

    class Dying(DartTrainer):
        def _save_rng_state(self, output_dir: str) -> None:
            if str(self.state.global_step) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            super()._save_rng_state(output_dir)

    trainer = trainer_of(Path(folder), **RUN)
    trainer.__class__ = Dying
    trainer.train(resume_from_checkpoint=str(Path(folder, "checkpoint-2")))


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.matrix), 9])
def test_a_resumed_run_on_a_stream_is_the_run(tmp_path: Path, step: int) -> None:
    """Within the first pass through the documents, and after it."""
    random, names, weights = np.random.default_rng(0), [], []
    for part in range(2):
        rows = [{"input_ids": random.integers(2, 61, size).tolist()} for size in random.integers(6, 30, 20)]
        names.append(write_json_lines(tmp_path / f"{part}.jsonl", rows))
    mixed = DataArguments(names, shares=[0.3, 0.7], streaming=True, max_length=24)
    options = {"per_device_train_batch_size": 8, "max_steps": 11, "save_strategy": "steps", "save_steps": step}
    for checkpoint in (None, str(tmp_path / f"checkpoint-{step}")):
        trainer = trainer_on(tmp_path, load_rows(mixed, chat_tokenizer(None), 4)[0], **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == 11
        weights.append(trainer.drafter.state_dict())
    torch.testing.assert_close(*weights)


def copied(target: Any, lora: LoraArguments = LoraArguments(lora_rank=2), **config: Any) -> DartHead:  # noqa: B008
    fields = {"copy_layer": "last", "feature_layers": [1, 2]}
    return apply_lora(tiny_head(target, **{**fields, **config}), lora)


def scaled(target: Any) -> DartHead:
    """As `copied`, with an adapter that counts for more."""
    head = copied(target, LoraArguments())
    head.add_adapter(LoraConfig(r=2, lora_alpha=4, use_rslora=True))
    return head


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a head and of an adapter on a copied layer, which nobody changes."""
    folder = tmp_path_factory.mktemp("runs")
    trainer_of(folder / "head").train()
    trainer_of(folder / "adapter", copied).train()
    return folder


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs, tmp_path / "runs"))


def refused(trainer: Any, checkpoint: Path, words: str) -> None:
    sentences.refused(lambda: trainer.train(resume_from_checkpoint=str(checkpoint)), ValueError, words)


@pytest.mark.parametrize("name", [*HEAD, *ADAPTER])
def test_what_is_damaged_is_refused(run: Path, name: str) -> None:
    kind, head = ("adapter", copied) if name in ADAPTER else ("head", None)
    checkpoint = run / kind / "checkpoint-2"
    trainer = trainer_of(run / "on", head)
    file = checkpoint / name
    content = file.read_bytes()
    says = r"cannot be read \(.*\); resume with"
    if name == "adapter_model.safetensors":
        says = "adapter.checkpoint-2 are truncated"
    for other in (b"", b"\0" * len(content), b"[]", content[: len(content) // 2]):
        file.write_bytes(other)
        refused(trainer, checkpoint, says)
    if name == "optimizer.pt":
        torch.save(print, file)
        refused(trainer, checkpoint, "Weights only load failed")


def test_checkpoints_of_another_run_and_weights_only(run: Path) -> None:
    cases: list[tuple[Any, str, str]] = [
        (eagle, "head", "has model_type='dart' and this run"),
        (copied, "head", "a whole drafter and this run"),
        (tiny_head, "adapter", "holds an adapter and this run trains a whole drafter"),
        (partial(copied, draft_length=5), "adapter", "draft_length=4 and this run 5"),
        (partial(copied, feature_layers=[0, 2]), "adapter", r"feature_layers=\[1, 2\] and this run"),
        (partial(copied, lora=LoraArguments(lora_rank=3)), "adapter", "has r=2 and this run 3"),
        (partial(copied, lora=LoraArguments(2, lora_targets=["q_proj"])), "adapter", "does not fit this head"),
        (scaled, "adapter", "has use_rslora=False and this run True"),
    ]
    for head, begun, says in cases:
        refused(trainer_of(run / "on", head), run / begun / "checkpoint-2", says)
    checkpoint = run / "head" / "checkpoint-2"
    (checkpoint / "optimizer.pt").unlink()
    refused(trainer_of(run / "on"), checkpoint, "no checkpoint: it holds no optimizer.pt; begin .* `head: .*-2`")
    # Tuples come back as lists, which are the same.
    tree = asdict(TreeConfig(verify_costs=((1.0, 1.0), (8.0, 1.5))))
    trainer = trainer_of(run / "own", partial(tiny_head, tree=tree, rope_frequencies=(1.0, 0.5, 0.2, 0.1)), max_steps=1)
    trainer.train()
    check_checkpoint(run / "own" / "checkpoint-1", trainer.drafter)


@pytest.mark.parametrize("trained", [True, False])
def test_an_adapter_is_trained_alone_and_resumes(tmp_path: Path, trained: bool) -> None:
    """On a head that was trained before, and on a copied layer."""

    def head(target: Any, seed: int = 1) -> DartHead:
        if not trained:
            return copied(target)
        base = tmp_path / f"base-{seed}"
        if not base.exists():
            tiny_head(target, seed=seed).save_pretrained(base)
        return apply_lora(DartHead.from_pretrained(str(base), target=target), LoraArguments(lora_rank=2))

    whole, first = trainer_of(tmp_path / "run", head), tmp_path / "run" / "checkpoint-1"
    before = copies(whole.drafter)
    with pytest.raises(ValueError, match="leave lora_rank out to train that one"):
        apply_lora(whole.drafter, LoraArguments(lora_rank=2))
    whole.train()
    after, moved = whole.drafter.state_dict(), changed(whole.drafter, before)
    assert moved
    assert all("lora_" in name or "modules_to_save" in name for name in moved)
    resumed = trainer_of(tmp_path / "on", head)
    resumed.train(resume_from_checkpoint=str(first))
    last = first.with_name("checkpoint-2")
    assert not (last / "model.safetensors").exists()
    assert not changed(resumed.drafter, after)
    # What new parts were before training is not kept.
    others = changed(DartHead.from_pretrained(str(last), target=whole.target), after)
    assert all("original_module" in name for name in others)
    if trained:
        refused(trainer_of(tmp_path / "on", partial(head, seed=2)), first, "was trained on another head")


@pytest.mark.parametrize("max_steps", [2, 1])
def test_nothing_is_trained_behind_the_last_step(run: Path, max_steps: int) -> None:
    trainer = trainer_of(run / "on", max_steps=max_steps)
    trainer.train(resume_from_checkpoint=str(run / "head" / "checkpoint-2"))
    assert trainer.state.global_step == 2
    assert not list((run / "on").iterdir())


def test_a_resumed_run_is_as_patient_as_the_run(tmp_path: Path, run: Path) -> None:
    """Whatever stopped it; more patience lets it go on, and early stopping may be added."""

    def steps(patience: int, **options: Any) -> int:
        still = {"learning_rate": 0.0, "max_steps": 6, **EVALUATED}
        trainer = trainer_of(tmp_path, early_stopping_patience=patience, **{**still, **options})
        trainer.train(resume_from_checkpoint="max_steps" not in options)
        return trainer.state.global_step

    assert steps(2, max_steps=2) == 2  # the first sets the mark, the second is no better
    assert steps(2) == 3
    assert steps(2) == 3
    assert steps(3) == 4
    trainer = trainer_of(run / "on", early_stopping_patience=3, max_steps=3, **EVALUATED)
    trainer.train(resume_from_checkpoint=str(run / "head" / "checkpoint-2"))
    assert trainer.state.global_step == 3
    trainer = trainer_of(tmp_path / "twice", early_stopping_patience=1, learning_rate=0.0, max_steps=4, **EVALUATED)
    for _ in range(2):
        trainer.train()
        assert trainer.state.global_step == 2


if __name__ == "__main__":
    dying(*sys.argv[1:])
