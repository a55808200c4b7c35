"""Captured parts that go wrong are told by the simulated GPU; and which kernels of attention run on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.simulated_gpu import SimulatedGpu, simulated_gpu
from support.tiny import prompts, tiny_head, tiny_target

import hf_dart
from hf_dart import TreeConfig
from hf_dart.models.attention import masked_attention
from hf_dart.models.verify import Verifier


@pytest.fixture
def device() -> Any:
    with simulated_gpu() as gpu:
        yield gpu


def test_a_graph_runs_on_what_lies_in_its_memory(device: SimulatedGpu) -> None:
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
    launches = device.launches
    for _ in range(2):
        graph.replay()
    x.fill_(10)
    graph.replay()
    assert total.tolist() == [0, 24, 24]
    assert (len(called), device.replays, device.launches) == (1, 3, launches + 1), (
        "replays are not Python, nor launches"
    )


BROKEN: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "a number is read": ("asks the host", lambda logits: logits if float(logits.sum()) > -1e9 else ()),
    "a tensor of the host": ("same device", lambda logits: logits + torch.zeros(1, 1, 1)),
    "a draw": ("draws while", lambda logits: logits + 0 * torch.rand_like(logits)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_forwards_that_go_wrong(what: str, device: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host is asked, or brings into it, keeps a forward from being captured, and the call says why."""
    message, broken = BROKEN[what]
    forward = Verifier.forward

    def goes_wrong(self: Verifier, *args: Any) -> Any:
        logits, features = forward(self, *args)
        return broken(logits) if self.cache.entries.fixed else logits, features

    monkeypatch.setattr(Verifier, "forward", goes_wrong)
    target = tiny_target("llama", "sdpa", torch.float32).to("cuda")
    head = tiny_head(target)
    made = hf_dart.compile(target, head, backend=None, first_tier=16)
    ids = {name: part.to("cuda") for name, part in prompts([7]).items()}
    with pytest.warns(UserWarning, match=f"it could not be made .*{message}"):
        target.generate(**ids, assistant=head, tree_config=TreeConfig(nodes=4), do_sample=False, max_new_tokens=4)
    assert not any(made.tiers)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # groups of queries, and none
def test_attention_makes_no_plans(family: str, captured: bool, device: SimulatedGpu) -> None:
    """cuDNN's makes one for each number of keys, which every round of the target and of the head brings."""
    target = tiny_target(family, "sdpa", torch.bfloat16).to("cuda")
    head = tiny_head(target)
    if captured:
        hf_dart.compile(target, head, backend=None, first_tier=16)
    ids = {name: part.to("cuda") for name, part in prompts([9, 3]).items()}
    options = {"assistant": head, "tree_config": TreeConfig(nodes=5), "do_sample": False}
    target.generate(**ids, max_new_tokens=1, **options)
    prefill = device.attention["as PyTorch chooses"]
    assert prefill
    device.attention.clear()
    target.generate(**ids, max_new_tokens=12, **options)
    assert head.last_stats.rounds > 1
    assert device.attention["as PyTorch chooses"] <= prefill, "by stock's own prefill alone"
    assert device.attention["efficient"] >= 3  # a layer of the head and two of the target


def test_masks_whose_rows_begin_anywhere(device: SimulatedGpu) -> None:
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
