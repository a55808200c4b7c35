"""FSDP: two processes that each hold half of the head train as one that holds it whole.

accelerate shards on accelerators alone and takes DDP on a CPU without a word; `Sharded` shows it another kind of
device, whose tensors then live on the CPU all the same. Everything after that is what runs on GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from support.scripts import command, environment
from support.tiny_training import tiny_head, tiny_target, tiny_trainer, token_rows
from torch.distributed.fsdp import FSDPModule

from hf_dart import DartHead, DiffusionDrafter, EagleDrafter
from hf_dart.training import DartTrainer, DartTrainingArguments

ROWS = [[24], [8, -16], [12, 12], [6, -18]]


def launch(processes: int, *words: str) -> subprocess.CompletedProcess[str]:
    line = command(__file__, *words, processes=processes)
    return subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment())


@pytest.mark.matrix
def test_a_sharded_head_trains_and_resumes_as_a_whole_one(tmp_path: Path) -> None:
    weights = []
    for processes in (1, 2):
        run = tmp_path / str(processes)
        for _ in ("from nothing", "on from the first checkpoint"):
            ended = launch(processes, "head", str(run))
            assert ended.returncode == 0, ended.stderr[-3000:]
            weights.append(DartHead.from_pretrained(str(run / "checkpoint-2"), target=tiny_target()).state_dict())
            (run / "checkpoint-2").rename(run / f"whole-{len(weights)}")
    for other in weights[1:]:
        for name, value in weights[0].items():
            torch.testing.assert_close(value, other[name], rtol=0, atol=1e-12)


@pytest.mark.matrix
def test_parts_beside_the_head_are_not_sharded(tmp_path: Path) -> None:
    ended = launch(2, "selector", str(tmp_path))
    assert ended.returncode != 0
    assert "without fsdp" in ended.stderr, ended.stderr[-3000:]


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


def main(part: str, folder: str) -> None:
    processes = int(os.environ["WORLD_SIZE"])
    target = tiny_target(torch.float64)
    head = tiny_head(target)
    head.add_selector(8)
    first = Path(folder, "checkpoint-1")
    rows = token_rows(ROWS)
    trainer = tiny_trainer(
        Path(folder),
        head,
        target,
        rows,
        rows,
        kind=Sharded if processes > 1 else DartTrainer,
        anchors_per_row=24,
        max_steps=2,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        decode_prompts=2,
        decode_prompt_tokens=6,
        per_device_train_batch_size=4 // processes,
        selector_only=part == "selector",
        fsdp=processes > 1,
    )
    trainer.train(resume_from_checkpoint=str(first) if first.exists() else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
