"""What a run goes on from: a whole checkpoint of its own, or one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from support.attacks import changed, damaged, seeds, survives
from support.tiny_training import LENGTHS, tiny_head, tiny_target, tiny_trainer, token_rows
from transformers import TrainerCallback

from hf_dart import DartHead, EagleDrafter, TreeConfig
from hf_dart.drafters.adapters import LoraArguments, apply_lora
from hf_dart.training import DartTrainer
from hf_dart.training.checkpoints.resuming import check_checkpoint, readable
from hf_dart.training.trainers.eagle import EagleTrainer

ROWS = token_rows(LENGTHS)
HEAD = ("config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "target.json")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}


class Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def trainer_of(folder: Path, head: Any = None, target: Any = None, **arguments: Any) -> DartTrainer:
    target = target or tiny_target()
    fields = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    head = head(target) if callable(head) and not isinstance(head, torch.nn.Module) else head or tiny_head(target)
    kind = EagleTrainer if isinstance(head, EagleDrafter) else DartTrainer
    return tiny_trainer(folder, head, target, ROWS, ROWS[:1], kind=kind, **{**fields, **arguments})


def copied(target: Any, lora: LoraArguments = LoraArguments(lora_rank=2), **config: Any) -> DartHead:  # noqa: B008
    fields = {"copy_layer": "last", "feature_layers": [1, 2]}
    return apply_lora(tiny_head(target, **{**fields, **config}), lora)


def scaled(target: Any, **options: Any) -> DartHead:
    """As `copied`, with an adapter that counts for more or less."""
    head = copied(target, LoraArguments())
    head.add_adapter(LoraConfig(r=2, lora_alpha=4, **options))
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


def refused(trainer: DartTrainer, checkpoint: Path, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


# ---- parts that are missing, foreign or damaged -----------------------------------------------------------


@pytest.mark.parametrize("part", seeds(6, 600))
@pytest.mark.parametrize("name", [*HEAD, *ADAPTER])
def test_damaged_files(run: Path, name: str, part: range) -> None:
    checkpoint = run / ("adapter" if name in ADAPTER else "head") / "checkpoint-2"
    trainer = trainer_of(run / "on", copied if name in ADAPTER else None)
    trainer.create_optimizer_and_scheduler(2)
    file = checkpoint / name
    content = file.read_bytes()

    def read() -> None:
        check_checkpoint(checkpoint, trainer.drafter, trainer.target)
        with torch.random.fork_rng(devices=[]):
            trainer._load_optimizer_and_scheduler(str(checkpoint))

    assert survives(read)
    for seed in part:
        if name.endswith(".json") and seed % 3:
            file.write_text(changed(json.loads(content), seed), encoding="latin1")
        else:
            file.write_bytes(damaged(content, seed))
        survives(read)


def test_what_is_damaged_is_named(run: Path) -> None:
    trainer, checkpoint = trainer_of(run / "head"), run / "head" / "checkpoint-2"
    for name in HEAD:
        file = checkpoint / name
        content = file.read_bytes()
        for other in (b"", b"\0" * len(content), b"[]"):
            file.write_bytes(other)
            part = "the state of the optimizer" if name.endswith(".pt") else name
            refused(trainer, checkpoint, rf"checkpoint-2 cannot be resumed \({part}: .*\); resume with .* another")
        file.write_bytes(content)
    torch.save(print, checkpoint / "optimizer.pt")
    refused(trainer, checkpoint, "the state of the optimizer: Weights only load failed")


def test_a_checkpoint_of_another_name(run: Path) -> None:
    """The number in a name that is not checkpoint-N is no step."""
    (run / "head" / "checkpoint-1").rename(run / "2024")
    trainer_of(run / "on").train(resume_from_checkpoint=str(run / "2024"))


def test_tuples_come_back_as_lists(tmp_path: Path) -> None:
    tree = asdict(TreeConfig(verify_costs=((1.0, 1.0), (8.0, 1.5))))
    trainer = trainer_of(tmp_path, partial(tiny_head, tree=tree, rope_frequencies=(1.0, 0.5, 0.2, 0.1)), max_steps=1)
    trainer.train()
    check_checkpoint(tmp_path / "checkpoint-1", trainer.drafter, trainer.target)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_weights_only(run: Path, name: str) -> None:
    checkpoint = run / "head" / "checkpoint-2"
    (checkpoint / name).unlink()
    refused(trainer_of(run / "on"), checkpoint, f"weights only, and no {name}; begin a run with `head: .*checkpoint-2`")


@pytest.mark.parametrize("lacks", [True, False])
def test_weights_of_another_shape(run: Path, lacks: bool) -> None:
    file = run / "head" / "checkpoint-2" / "model.safetensors"
    weights = load_file(file)
    weight = weights.pop("fc.weight")
    save_file(weights if lacks else {**weights, "fc.weight": weight[:3].clone()}, file, metadata={"format": "pt"})
    refused(trainer_of(run / "on"), file.parent, r"model.safetensors: fc.weight has the shape")


def test_another_kind_of_drafter(run: Path, tmp_path: Path) -> None:
    eagle = trainer_of(tmp_path / "eagle", lambda target: EagleDrafter.from_target(target, draft_length=4))
    refused(eagle, run / "head" / "checkpoint-2", "has model_type='dart' and this run 'dart_eagle'")
    refused(trainer_of(run / "on", copied), run / "head" / "checkpoint-2", "a whole drafter and this run")
    plain = trainer_of(run / "on", lambda target: tiny_head(target, copy_layer="last", feature_layers=[1, 2]))
    refused(plain, run / "adapter" / "checkpoint-2", "holds an adapter and this run trains a whole drafter")


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (lambda target: copied(target, draft_length=5), "draft_length=4 and this run 5"),
        (lambda target: copied(target, feature_layers=[0, 2]), r"feature_layers=\[1, 2\] and this run"),
        (lambda target: copied(target, block_attention="bidirectional"), "block_attention='causal'"),
        (lambda target: copied(target, copy_layer=1), "copied_layer=2 and this run 1"),
        (lambda target: copied(target, LoraArguments(lora_rank=3)), "has r=2 and this run 3"),
        (lambda target: copied(target, LoraArguments(lora_rank=2, lora_alpha=9)), "has lora_alpha=4 and this run 9"),
        (lambda target: copied(target, LoraArguments(lora_rank=2, lora_dropout=0.5)), "lora_dropout=0.0 and this"),
        (lambda target: copied(target, LoraArguments(lora_rank=2, lora_targets=["q_proj"])), "has target_modules="),
        (lambda target: scaled(target, use_rslora=True), "has use_rslora=False and this run True"),
        (lambda target: scaled(target, alpha_pattern={"q_proj": 9}), "has alpha_pattern={} and this run"),
    ],
)
def test_adapters_of_another_run(run: Path, head: Callable[[Any], DartHead], says: str) -> None:
    refused(trainer_of(run / "on", head), run / "adapter" / "checkpoint-2", says)


def test_an_adapter_of_another_head(tmp_path: Path) -> None:
    target = tiny_target()
    for seed in (1, 2):
        tiny_head(target, seed=seed).save_pretrained(tmp_path / f"base-{seed}")
        base = DartHead.from_pretrained(str(tmp_path / f"base-{seed}"), target=target)
        trainer = trainer_of(tmp_path / "run", apply_lora(base, LoraArguments(lora_rank=2)), target)
        if seed == 1:
            trainer.train()
        else:
            refused(trainer, tmp_path / "run" / "checkpoint-1", "was trained on another head")


def test_another_target_of_the_same_name(run: Path, tmp_path: Path) -> None:
    other = tiny_target()
    other.model.layers[1].mlp.up_proj.weight.data.mul_(-1)
    refused(trainer_of(run / "on", target=other), run / "head" / "checkpoint-2", "was trained on another target")
    renamed = tiny_target(torch.bfloat16).float()  # and rounded
    renamed.config.name_or_path = "elsewhere"
    trainer = trainer_of(run / "on", target=renamed, max_steps=3)
    assert trainer.drafter.config.target_name == "elsewhere"
    trainer.train(resume_from_checkpoint=str(run / "head" / "checkpoint-2"))
    (run / "head" / "checkpoint-2" / "target.json").unlink()  # without, the name has to do
    refused(trainer_of(run / "on", target=renamed), run / "head" / "checkpoint-2", "target_name=None and this run")


def test_memory_that_is_short_is_no_damage() -> None:
    with pytest.raises(torch.OutOfMemoryError), readable("checkpoint-1", "the state of the optimizer"):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_the_optimizer_of_other_weights(run: Path) -> None:
    file = run / "head" / "checkpoint-1" / "optimizer.pt"
    state = torch.load(file)
    state["param_groups"][0]["params"].pop()
    torch.save(state, file)
    refused(trainer_of(run / "on"), file.parent, "the state of the optimizer: loaded state dict contains")


# ---- runs that had ended ----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_steps", [2, 1])
def test_nothing_is_trained_behind_the_last_step(run: Path, max_steps: int) -> None:
    checkpoint = run / "head" / "checkpoint-2"
    trainer = trainer_of(run / "on", max_steps=max_steps)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 2
    assert not list((run / "on").iterdir())
    for name, value in load_file(checkpoint / "model.safetensors").items():
        assert torch.equal(trainer.drafter.state_dict()[name], value)


def test_a_run_that_had_stopped_early_has_stopped(tmp_path: Path) -> None:
    def steps(patience: int, resume: bool = True) -> int:
        trainer = trainer_of(tmp_path, early_stopping_patience=patience, learning_rate=0.0, max_steps=6, **EVALUATED)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.state.global_step

    assert steps(1, resume=False) == 2
    assert steps(1) == 2
    assert steps(2) == 3


def test_early_stopping_may_be_added(run: Path) -> None:
    trainer = trainer_of(run / "on", early_stopping_patience=3, max_steps=3, **EVALUATED)
    trainer.train(resume_from_checkpoint=str(run / "head" / "checkpoint-2"))
    assert trainer.state.global_step == 3


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
