"""Captured parts on a CUDA device, in fp32 with TF32 off: one graph, nothing read back, stock's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import batch
from support.compare import assert_identical_up_to_near_ties, tally
from support.ngrams import random_table
from support.simulated_gpu import needs_a_driver
from support.tiny import prompts, tiny_head, tiny_target

import hf_dart
from hf_dart import TreeConfig
from hf_dart.engine.engine import Engine

pytestmark = [
    needs_a_driver,
    pytest.mark.gpu,
    pytest.mark.usefixtures("full_fp32"),
    pytest.mark.filterwarnings("error:This call runs uncompiled"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # of torch's own, as it generates code
]
GREEDY = {"do_sample": False, "max_new_tokens": 40}
OTHERS = ["llama", "qwen3", "mistral", "gpt2", "qwen3_5", "lfm2"]
ENDS = {"eos_token_id": [3, 11, 19, 27], "pad_token_id": 0}


def on_gpu(family: str, backend: str | None, **fields: Any) -> tuple[Any, Any, Engine]:
    target: Any = tiny_target(family, "sdpa", torch.float32).to("cuda")
    head = tiny_head(target, **fields)
    return target, head, hf_dart.compile(target, head, backend=backend, first_tier=16)


def inputs(size: int) -> dict[str, torch.Tensor]:
    return {name: ids.to("cuda") for name, ids in batch(size, "sdpa").items()}


def compare(target: Any, head: Any, given: dict[str, torch.Tensor], label: str, **options: Any) -> None:
    assert_identical_up_to_near_ties(target, head, given, into=tally("fp32, captured"), label=label, **options)


def assert_host_is_not_asked(made: Engine) -> None:
    """No part of a round waits for the device."""
    assert made.tiers
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tier in made.tiers:
            for part in (*tier.forwards.values(), *tier.drafts.values()):
                part.launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("family", ["gemma3", *(pytest.param(family, marks=pytest.mark.matrix) for family in OTHERS)])
def test_families(family: str, backend: str | None) -> None:
    target, head, made = on_gpu(family, backend)
    for size in (1, 4):
        for tree in (TreeConfig(nodes=1), TreeConfig(nodes=13)):
            head.tree_config = tree
            for options in (GREEDY, {**GREEDY, **ENDS}):
                compare(target, head, inputs(size), f"{family}, captured, {backend}", **options)
    assert len(made.tiers) > 4


def test_one_launch_per_forward() -> None:
    """Of kernels, by the profiler: a replay is one `cudaGraphLaunch` and nothing else."""
    target, head, made = on_gpu("qwen3", None)
    target.generate(**inputs(1), assistant=head, tree_config=TreeConfig(nodes=16, lookup=0), **GREEDY)
    tier = next(iter(made.tiers)).forwards[16]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tier.launch()
    torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert sum(name == "cudaGraphLaunch" for name in names) == 1
    assert not any(name in ("cudaLaunchKernel", "cudaLaunchKernelExC") for name in names)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.matrix), 4])
def test_sampled(size: int) -> None:
    """With stock's seed, penalties and warpers inside; the generators are left where stock leaves them."""
    target, head, made = on_gpu("qwen3", None)
    warpers = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2, "min_new_tokens": 5}
    for seed in range(3):
        for options in ({"top_k": 0}, {**warpers, **ENDS}):
            options = {**options, "do_sample": True, "max_new_tokens": 40, "seed": seed}
            compare(target, head, inputs(size), f"sampled, {size}", **options)
    assert_host_is_not_asked(made)


def test_what_cannot_be_captured_leaves_nothing_behind() -> None:
    """Experts in a loop ask the host: that is told before a capture, and the generators go on as they were."""
    target, head, made = on_gpu("qwen3_moe", None)
    with pytest.warns(UserWarning, match="asks the host"):
        compare(target, head, inputs(1), "experts", do_sample=True, top_k=0, max_new_tokens=20)
    assert not any(made.tiers)
    torch.randn(3, device="cuda")


def test_copies_and_ngrams(tmp_path: Path) -> None:
    """All that a draft may ask for, in one graph that nothing is read back from."""
    target, head, made = on_gpu("llama", None, selector_rank=4)
    head.ngram = random_table(tmp_path / "words.ngram")
    head.tree_config = TreeConfig(nodes=16, lookup=24)
    for size in (1, 4):
        for options in (GREEDY, {**GREEDY, "do_sample": True, "top_k": 0}):
            # Prompts of one length: left padding in the middle of a text would be a hole.
            repeated = {name: part.to("cuda").repeat(1, 2) for name, part in prompts([9] * size).items()}
            compare(target, head, repeated, "copies, n-grams", **options)
    assert_host_is_not_asked(made)
