"""Captured parts on a CUDA device, in fp32 with TF32 off: one graph, nothing read back, stock's tokens.

Where there is none, they run on `support.simulated_gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.cases import batch
from support.compare import assert_identical_up_to_near_ties, tally
from support.ngrams import random_table
from support.simulated_gpu import SimulatedGpu, needs_a_driver
from support.tiny import prompts, tiny_head, tiny_target

import hf_dart
from hf_dart import TreeConfig
from hf_dart.decoding.session import Session
from hf_dart.engine.engine import Engine
from hf_dart.engine.graphs import Launch, Pool
from hf_dart.models.attention import masked_attention
from hf_dart.models.verify import Verifier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("full_fp32"),
    pytest.mark.filterwarnings("error:This call runs uncompiled"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # of torch's own, as it generates code
]
INDUCTOR = pytest.param("inductor", marks=needs_a_driver)
SIMULATED = pytest.mark.skipif(torch.cuda.is_available(), reason="counted on the simulated device")
GREEDY = {"do_sample": False, "max_new_tokens": 40}
OTHERS = ["llama", "qwen3", "mistral", "gpt2"]
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


@pytest.mark.parametrize("backend", [None, INDUCTOR])
@pytest.mark.parametrize("family", ["gemma3", *(pytest.param(family, marks=pytest.mark.matrix) for family in OTHERS)])
def test_families(family: str, backend: str | None) -> None:
    target, head, made = on_gpu(family, backend)
    for size in (1, 4):
        for tree in (TreeConfig(nodes=1), TreeConfig(nodes=13)):
            head.tree_config = tree
            for options in (GREEDY, {**GREEDY, **ENDS}):
                compare(target, head, inputs(size), f"{family}, captured, {backend}", **options)
    assert len(made.tiers) > 4


def test_one_launch_per_forward(gpu: SimulatedGpu | None) -> None:
    """Of kernels, by the profiler: a replay is one `cudaGraphLaunch` and nothing else."""
    target, head, made = on_gpu("qwen3", None)
    target.generate(**inputs(1), assistant=head, tree_config=TreeConfig(nodes=16, lookup=0), **GREEDY)
    made_first = next(iter(made.tiers))
    tier = made_first.forwards[16]
    if gpu is not None:
        before = gpu.launches, gpu.replays
        tier.launch()
        assert (gpu.launches, gpu.replays) == (before[0], before[1] + 1)
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tier.launch()
    torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert sum(name == "cudaGraphLaunch" for name in names) == 1
    assert not any(name in ("cudaLaunchKernel", "cudaLaunchKernelExC") for name in names)


@SIMULATED
@pytest.mark.parametrize("sampled", [False, True])
def test_what_a_round_asks(sampled: bool, gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches of graphs, one list that is read, and few copies: what docs/gpu.md says of a round."""
    target, head, _ = on_gpu("llama", None)
    options = {"do_sample": sampled, "top_k": 0, "max_new_tokens": 24, "tree_config": TreeConfig(nodes=8)}
    same = {name: part.to("cuda") for name, part in prompts([9] * 4).items()}
    torch.manual_seed(0)
    target.generate(**same, assistant=head, **options)
    found: list[tuple[int, ...]] = []
    count = Session.count

    def counted(self: Session, *round_: Any) -> None:
        count(self, *round_)
        asked, reads = gpu.questions.total(), gpu.questions["tolist"]
        found.append((gpu.replays, reads, asked - reads, gpu.launches))

    monkeypatch.setattr(Session, "count", counted)
    torch.manual_seed(0)  # trees and tiers as in the first call: nothing is captured now
    target.generate(**same, assistant=head, **options)
    replays, reads, copies, launches = (last - first for first, last in zip(found[1], found[5], strict=True))
    assert (replays, reads) == (4 * 2, 4)
    assert copies <= 4 * 27
    assert launches <= 4 * 120


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


# ---- what the simulated one tells -------------------------------------------------------------------------


@SIMULATED
def test_a_graph_runs_on_what_lies_in_its_memory(gpu: SimulatedGpu) -> None:
    x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    called: list[None] = []

    def step() -> None:
        called.append(None)
        part = (x * 2)[1:]  # a view of something that each replay makes
        total[1:] += part

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert total.tolist() == [0, 0, 0], "a capture runs nothing"
    launches = gpu.launches
    for _ in range(2):
        graph.replay()
    x.fill_(10)
    graph.replay()
    assert total.tolist() == [0, 24, 24]
    assert (len(called), gpu.replays, gpu.launches) == (1, 3, launches + 1), "replays are not Python, nor launches"


BROKEN: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "a number is read": ("asks the host", lambda logits: logits if float(logits.sum()) > -1e9 else ()),
    "a tensor of the host": ("same device", lambda logits: logits + torch.zeros(1, 1, 1)),
    "a draw": ("draws while", lambda logits: logits + 0 * torch.rand_like(logits)),
}


@SIMULATED
@pytest.mark.parametrize("what", BROKEN)
def test_forwards_that_go_wrong(what: str, gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads on the host, and values from it, keep a forward from being captured, and the call says why."""
    message, broken = BROKEN[what]
    forward = Verifier.forward

    def goes_wrong(self: Verifier, *args: Any) -> Any:
        logits, features = forward(self, *args)
        return broken(logits) if self.cache.entries.fixed else logits, features

    monkeypatch.setattr(Verifier, "forward", goes_wrong)
    target, head, made = on_gpu("llama", None)
    with pytest.warns(UserWarning, match=f"it could not be made .*{message}"):
        target.generate(**inputs(1), assistant=head, tree_config=TreeConfig(nodes=4), do_sample=False, max_new_tokens=4)
    assert not any(made.tiers)


@SIMULATED
def test_a_capture_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread goes on in the stream where it was."""
    before, streams, x = Mock(), [], torch.ones(1, device="cuda")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: before)
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    with pytest.raises(RuntimeError, match="when stream is capturing"):
        Launch(x.item, torch.device("cuda"), Pool(None, Mock()))
    assert streams == [before]


@SIMULATED
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # groups of queries, and none
def test_attention_makes_no_plans(family: str, captured: bool, gpu: SimulatedGpu) -> None:
    """cuDNN's makes one for each number of keys, which every round of the target and of the head brings."""
    target = tiny_target(family, "sdpa", torch.bfloat16).to("cuda")
    head = tiny_head(target)
    if captured:
        hf_dart.compile(target, head, backend=None, first_tier=16)
    ids = {name: part.to("cuda") for name, part in prompts([9, 3]).items()}
    options = {"assistant": head, "tree_config": TreeConfig(nodes=5), "do_sample": False}
    target.generate(**ids, max_new_tokens=1, **options)
    prefill = gpu.attention["as PyTorch chooses"]
    assert prefill
    gpu.attention.clear()
    target.generate(**ids, max_new_tokens=12, **options)
    assert head.last_stats.rounds > 1
    assert gpu.attention["as PyTorch chooses"] <= prefill, "by stock's own prefill alone"
    assert gpu.attention["efficient"] >= 3  # a layer of the head and two of the target


@SIMULATED
def test_masks_whose_rows_begin_anywhere(gpu: SimulatedGpu) -> None:
    """The kernel refuses them; ours are copied to rows that it takes."""
    query, key, value = (torch.randn(2, 3, 4, 8, dtype=torch.bfloat16).cuda() for _ in range(3))
    for shown in (torch.rand(2, 1, 4, 4) > 0.3, torch.ones(2, 1, 4, 4, dtype=torch.bool)):
        shown[..., 0] = True
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(part.cpu().float() for part in (query, key, value)), attn_mask=shown
        )
        found = masked_attention(query, key, value, shown.cuda())
        torch.testing.assert_close(found.cpu().float(), wanted, atol=0.02, rtol=0.02)
    bias = torch.zeros(2, 1, 4, 4, dtype=torch.bfloat16, device="cuda").expand(2, 3, 4, 4)
    with pytest.raises(RuntimeError, match="not correctly aligned"):
        torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, False)
