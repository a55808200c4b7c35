"""Two processes train as one does: by DDP, and by FSDP, where each holds half of the head.

accelerate shards on accelerators alone and takes DDP on a CPU without a word; `Sharded` shows it another kind of
device, whose tensors then live on the CPU all the same. Everything after that is what runs on GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from support.scripts import command, environment
from support.tiny_training import tiny_head, tiny_target, tiny_trainer, token_rows
from torch.distributed.fsdp import FSDPModule

from hf_dart import DartHead, DiffusionDrafter, EagleDrafter
from hf_dart.training import DartTrainer, DartTrainingArguments

ROWS = [[24], [8, -16], [12, 12], [6, -18]]  # unequal numbers of blocks on the two sides
PARTS: dict[str, dict[str, Any]] = {
    "dart": {},
    "left_to_right": {"loss": "left_to_right"},
    "lk": {"loss": "lk"},
    "own_lm_head": {"loss_chunk": 0},
    "selector": {"selector_only": True, "selector_noise": 0.0},  # processes draw noise of their own
}
REFUSED: dict[str, dict[str, Any]] = {"muon": {"muon_learning_rate": 1e-2}, "own_embeddings": {}}  # by FSDP
assert_same = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


def launch(processes: int, *words: str) -> subprocess.CompletedProcess[str]:
    line = command(__file__, *words, processes=processes)
    return subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment())


def trained(processes: int, kind: str, part: str, run: Path) -> dict[str, Any]:
    """Weights and figures after the second step."""
    ended = launch(processes, kind, part, str(run))
    assert ended.returncode == 0, ended.stderr[-3000:]
    logs = json.loads((run / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    figures = {name: torch.tensor(value) for log in logs for name, value in log.items() if "tau" in name}
    assert "eval_tau_decoded" in figures
    return {**load_file(run / "checkpoint-2" / "model.safetensors"), **figures}


@pytest.mark.matrix
@pytest.mark.parametrize("part", PARTS)
def test_two_processes_are_one(part: str, tmp_path: Path) -> None:
    assert_same(*(trained(processes, "ddp", part, tmp_path / str(processes)) for processes in (1, 2)))


@pytest.mark.matrix
def test_a_sharded_head_trains_and_resumes_as_a_whole_one(tmp_path: Path) -> None:
    results = []
    for processes in (1, 2):
        run = tmp_path / str(processes)
        for _ in ("from nothing", "on from the first checkpoint"):
            results.append(trained(processes, "fsdp", "dart", run))
            (run / "checkpoint-2").rename(run / f"whole-{len(results)}")
    for other in results[1:]:
        assert_same(results[0], other)
    # What runs outside of the head's forward is not gathered, and no part of a matrix can be trained as one.
    for part, told in (("selector", "without fsdp"), ("own_embeddings", "without fsdp"), ("muon", "whole matrices")):
        ended = launch(2, "fsdp", part, str(tmp_path))
        assert ended.returncode != 0
        assert told in ended.stderr, ended.stderr[-3000:]


@pytest.mark.parametrize("kind", [DartHead, EagleDrafter, DiffusionDrafter])
def test_a_drafter_takes_the_class_that_fsdp_gives_it(kind: type[Any]) -> None:
    drafter = kind.__new__(kind)
    drafter.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
    assert isinstance(drafter, FSDPModule)


class Sharded(DartTrainer):
    def __init__(self, head: DartHead, target: Any, args: DartTrainingArguments, **kwargs: Any) -> None:
        assert args.device.type == "cpu"  # asking for it starts the processes' group
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_NEURON
        super().__init__(head, target, args, **kwargs)
        assert self.is_fsdp_enabled


def main(kind: str, part: str, folder: str) -> None:
    processes = int(os.environ["WORLD_SIZE"])
    sharded = kind == "fsdp" and processes > 1
    target = tiny_target(torch.float64)
    read = "own" if part == "own_embeddings" else "target"
    head = tiny_head(target, own_lm_head=part == "own_lm_head", embeddings=read)
    if part == "selector":
        head.add_selector(8)
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    options |= {"decode_prompts": 2, "decode_prompt_tokens": 6, "anchors_per_row": 24, "fsdp": sharded}
    options |= {"per_device_train_batch_size": 4 // processes, **(PARTS | REFUSED)[part]}
    options |= {} if kind == "fsdp" else {"optim": "sgd", "max_grad_norm": 0.0}
    rows, trainer_kind = token_rows(ROWS), Sharded if sharded else DartTrainer
    trainer = tiny_trainer(Path(folder), head, target, rows, rows, trainer_kind, **options)
    first = Path(folder, "checkpoint-1")
    trainer.train(resume_from_checkpoint=str(first) if first.exists() else None)
    trainer.accelerator.end_training()  # else threads of gloo may abort the process at its end


if __name__ == "__main__":
    main(*sys.argv[1:])
