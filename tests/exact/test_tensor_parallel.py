"""Tensor parallelism: two processes that each hold half of a target write what stock writes in them, and in step."""

from __future__ import annotations

import subprocess
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.compare import assert_identical
from support.scripts import command, environment
from support.users import Listener, OwnError
from torch import distributed
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import hf_dart
from hf_dart import DartHead

PAIR = Path(hf_dart.__file__).parent / "demo_pair"
TEXTS = ["import argparse\nimport sys\n\n\ndef parse_", "class TestRows:\n    def test_empty(self):\n", "def load("]
SAMPLED = {"do_sample": True, "max_new_tokens": 16}
PATIENCE = 5.0
"""Seconds that a process waits for the other one in the end."""


def test_two_processes_hold_a_target() -> None:
    line = command(__file__, processes=2)
    ended = subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment())
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert ended.stdout.count("all is as it is to be") == 2, ended.stdout


def main() -> None:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    first = distributed.get_rank() == 0
    plan = DistributedConfig(tp_plan="auto", tp_size=2)
    target = AutoModelForCausalLM.from_pretrained(PAIR / "model", dtype=torch.float64, distributed_config=plan)
    head = DartHead.from_pretrained(str(PAIR / "head"), target=target)
    if not first:
        late(head, "transitions")
        target.lm_head.register_forward_pre_hook(lambda *_: time.sleep(0.002))
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "model", padding_side="left")
    one, three = (dict(tokenizer(texts, return_tensors="pt", padding=True)) for texts in (TEXTS[:1], TEXTS))
    exact(target, head, one, do_sample=False, max_new_tokens=20)
    exact(target, head, one, **SAMPLED)
    exact(target, head, three, **SAMPLED, top_p=0.9, repetition_penalty=1.1)
    different_calls_are_refused(target, head, one, first)
    what_one_alone_has_learnt_is_not_used(target, head, one, first)
    with pytest.raises(ValueError, match="leave learner= out"):
        hf_dart.attach(target, head, learner=hf_dart.Learner())
    parts_of_weights_are_not_read_as_wholes(target, head, one)
    one_alone_raises(target, head, one, first)
    print("all is as it is to be")


def late(head: Any, name: str) -> None:
    """Let a method of the head take up to 5 ms more than in the other process."""
    method, random = getattr(head, name), Random(0)

    def slow(*args: Any) -> Any:
        time.sleep(random.random() / 200)
        return method(*args)

    setattr(head, name, slow)


def exact(target: Any, head: Any, inputs: dict[str, Any], **options: Any) -> None:
    """As in stock; and drafts were accepted, in both processes the same ones."""
    assert_identical(target, head, inputs, **options)
    stats = head.last_stats
    assert stats.tau > 1.3, stats
    ours = torch.tensor([stats.rounds, stats.drafted, stats.accepted])
    gathered = [torch.zeros_like(ours) for _ in range(2)]
    distributed.all_gather(gathered, ours)
    assert torch.equal(*gathered), gathered


def different_calls_are_refused(target: Any, head: Any, inputs: dict[str, Any], first: bool) -> None:
    torch.manual_seed(first)
    calls: list[tuple[Any, dict[str, Any]]] = [
        (inputs["input_ids"], SAMPLED),
        (inputs["input_ids"][:, int(first) :], {"do_sample": False, "max_new_tokens": 4}),
        (inputs["input_ids"], {"do_sample": False, "max_new_tokens": 4, "return_dict_in_generate": first}),
    ]
    for ids, options in calls:
        with pytest.raises(ValueError, match="with different prompts, options or generator states"):
            target.generate(ids, **options, assistant=head)


def what_one_alone_has_learnt_is_not_used(target: Any, head: Any, inputs: dict[str, Any], first: bool) -> None:
    """As from a streamer that raised with the last token, after all forwards: the next call begins alike in both."""
    options = {"do_sample": False, "max_new_tokens": 4, "assistant": head}
    with pytest.raises(OwnError) if first else nullcontext():
        target.generate(**inputs, **options, streamer=Listener(4) if first else None)
    assert not head.pace_records
    exact(target, head, inputs, **SAMPLED)


def parts_of_weights_are_not_read_as_wholes(target: Any, head: Any, inputs: dict[str, Any]) -> None:
    head.reduce_vocabulary(range(3000)).reads_rows = True
    hf_dart.compile(target, head)
    with pytest.warns(UserWarning, match="several processes"):
        exact(target, head, inputs, **SAMPLED)
    head.reduce_vocabulary(None).engine = None


def one_alone_raises(target: Any, head: Any, inputs: dict[str, Any], first: bool) -> None:
    """The other one waits for it no longer than the group lets it."""
    group = next(target.parameters()).device_mesh.get_group()
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENCE), group)
    began = time.monotonic()
    with pytest.raises(OwnError) if first else pytest.raises(RuntimeError, match="Timed out"):
        target.generate(**inputs, **SAMPLED, assistant=head, streamer=Listener(5) if first else None)
    assert time.monotonic() - began < PATIENCE + 20
    store = distributed.distributed_c10d._get_default_store()
    if first:
        store.wait(["waited"])  # lives on, or the other one would see that it has gone
    else:
        store.set("waited", "")


if __name__ == "__main__":
    main()
