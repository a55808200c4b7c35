"""Weights that lie in one storage: nobody but rounds of ours notices, and `detach` undoes it."""

from __future__ import annotations

import copy
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from support.cases import batch
from support.compare import assert_identical
from support.engines import engine
from support.tiny import tiny_head, tiny_target
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM

import hf_dart
from hf_dart.target import fused as module
from hf_dart.target.fused import FusedLinears, fuse, fused, separate

IDS = torch.arange(12).view(2, 6)
GREEDY = {"do_sample": False, "max_new_tokens": 20}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


def logits(target: Any) -> torch.Tensor:
    with torch.no_grad():
        return target(IDS).logits


def products(target: Any) -> int:
    with Products() as counted:
        logits(target)
    return counted.count


def storages(target: Any) -> int:
    return len({weight.untyped_storage().data_ptr() for weight in target.parameters()})


@pytest.mark.parametrize(("family", "fields"), [("qwen3", {}), ("llama", {"attention_bias": True, "mlp_bias": True})])
def test_the_same_numbers_from_fewer_products(family: str, fields: dict[str, Any]) -> None:
    target = tiny_target(family, **fields)
    for name, weight in target.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(weight)
    wanted, before, layers = logits(target), storages(target), target.config.num_hidden_layers
    held = {name: weight.clone() for name, weight in target.state_dict().items()}
    groups = fuse(target)
    assert len(groups) == 2 * layers
    assert storages(target) == before - 3 * layers * (2 if fields else 1)
    assert all(torch.equal(weight, held[name]) for name, weight in target.state_dict().items())
    assert torch.equal(logits(target), wanted)
    plain = products(target)
    with fused(groups):
        torch.testing.assert_close(logits(target), wanted)
        assert products(target) == plain - 3 * layers
    assert products(target) == plain
    assert not any("forward" in vars(part) for part in target.modules())
    separate(target)
    assert storages(target) == before
    assert torch.equal(logits(target), wanted)


def test_again() -> None:
    """What was fused before is used as it lies, and weights that were moved or replaced are found."""
    target = tiny_target("qwen3")
    fuse(target)
    lie = [weight.data_ptr() for weight in target.parameters()]
    assert len(fuse(target)) == 4
    assert [weight.data_ptr() for weight in target.parameters()] == lie
    target.to(torch.float32).to(torch.float64)  # each gets memory of its own
    wanted = logits(target)
    with fused(fuse(target)):
        torch.testing.assert_close(logits(target), wanted)


def test_written_to() -> None:
    """Training and merging write into the parameters, and the whole is the same memory."""
    target = tiny_target("qwen3")
    groups = fuse(target)
    target.train()
    optimizer = torch.optim.SGD(target.parameters(), lr=0.1)
    target(IDS, labels=IDS).loss.backward()
    optimizer.step()
    target.eval()
    wanted = logits(target)
    with fused(groups):
        torch.testing.assert_close(logits(target), wanted)


def test_saved_and_copied(tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    wanted = logits(target)
    fuse(target)
    target.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64).eval()
    assert torch.equal(logits(loaded), wanted)
    torch.save(target.state_dict(), tmp_path / "weights")
    loaded = tiny_target("qwen3", seed=1)
    loaded.load_state_dict(torch.load(tmp_path / "weights"))
    assert torch.equal(logits(loaded), wanted)
    with fused(fuse(target)):
        twin = copy.deepcopy(target)
    with torch.no_grad():
        target.model.layers[0].self_attn.k_proj.weight.zero_()
    with fused(fuse(twin)):
        torch.testing.assert_close(logits(twin), wanted)


def test_in_inference_mode() -> None:
    """Weights can be trained afterwards."""
    target = tiny_target("qwen3")
    wanted = logits(target)
    with torch.inference_mode():
        with fused(fuse(target)):
            torch.testing.assert_close(logits(target), wanted)
        separate(target)
    assert not any(weight.is_inference() for weight in target.parameters())
    target(IDS, labels=IDS).loss.backward()


class Wrapped(torch.Tensor):
    """A weight without a storage of its own, such as torchao's."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner.detach())
        args, kwargs = tree_map_only(cls, lambda weight: weight.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


@pytest.mark.filterwarnings("error::UserWarning")
def test_beside_quantised_weights() -> None:
    """Those of attentions stay as they are, and what else there is, is fused."""
    target: Any = tiny_target("qwen3")
    for layer in target.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.o_proj):
            linear.weight = nn.Parameter(Wrapped(linear.weight.detach()), requires_grad=False)
    head = tiny_head(target)
    made = engine(target, head, fuse=True, first_tier=64)
    assert_identical(target, head, batch(1, "sdpa"), **GREEDY)
    (tier,) = made.tiers
    assert tier is not None
    assert len(tier.round.verifier._kernels.linears) == 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks for it
def test_left_alone() -> None:
    """Other kinds of layers, tied weights, layers that have a forward of their own, adapters."""
    peft = pytest.importorskip("peft")
    target = tiny_target("qwen3", num_hidden_layers=5)
    names: list[Any] = [layer.mlp for layer in target.model.layers]

    class Quantized(nn.Linear):
        pass

    names[0].up_proj = Quantized(names[0].up_proj.in_features, names[0].up_proj.out_features, False).double()
    names[1].up_proj.weight = names[2].up_proj.weight
    nn.utils.parametrizations.weight_norm(names[3].gate_proj)
    names[4].gate_proj.forward = names[4].gate_proj.forward
    wanted = logits(target)
    groups = fuse(target)
    assert len(groups) == 5, "attention alone"
    lora = peft.LoraConfig(target_modules=["q_proj"], layers_to_transform=[0, 1, 2])
    tuned = peft.get_peft_model(target, lora)
    assert len(fuse(tuned)) == 2
    with fused(fuse(tuned)):
        torch.testing.assert_close(logits(tuned), wanted)


def test_other_threads_and_inputs() -> None:
    """Each thread has its own way to compute, and layers that are called with other inputs compute for themselves."""
    target = tiny_target("qwen3")
    groups = fuse(target)
    attention: Any = target.model.layers[0].self_attn
    one, other = torch.randn(2, 3, 5, attention.q_proj.in_features, dtype=torch.float64).unbind()
    counts: list[int] = []
    with fused(groups):
        thread = Thread(target=lambda: counts.append(products(target)))
        thread.start()
        thread.join()
        attention.q_proj(one)
        torch.testing.assert_close(attention.k_proj(other), nn.Linear.forward(attention.k_proj, other))
        torch.testing.assert_close(attention.k_proj(one), nn.Linear.forward(attention.k_proj, one))
    assert counts == [products(target)]


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("backend", [None, pytest.param("eager", marks=pytest.mark.matrix)])
def test_rounds(backend: str | None) -> None:
    target = tiny_target("qwen3")
    head = tiny_head(target)
    hf_dart.attach(target)
    before = storages(target)
    made = engine(target, head, backend=backend, fuse=True, first_tier=64)
    for size in (1, 4):
        assert_identical(target, head, batch(size, "sdpa"), **GREEDY)
    assert [len(tier.round.verifier._kernels.linears) for tier in made.tiers if tier] == [4, 4]  # type: ignore[attr-defined]
    assert storages(target) < before
    hf_dart.detach(target)
    assert storages(target) == before
    hf_dart.attach(target)
    assert_identical(target, head, batch(1, "sdpa"), **GREEDY)


def test_other_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds go on without what does not stand the trial."""

    def wrong(self: FusedLinears, place: int, x: torch.Tensor) -> torch.Tensor:
        linear = self.linears[place]
        return nn.functional.linear(x, linear.weight.flip(0), linear.bias)

    monkeypatch.setattr(module.FusedLinears, "__call__", wrong)
    target = tiny_target("qwen3")
    head = tiny_head(target)
    made = engine(target, head, fuse=True, first_tier=64)
    with pytest.warns(UserWarning, match="go on without the kernels that were asked for: .*computes something else"):
        assert_identical(target, head, batch(1, "sdpa"), **GREEDY)
    (tier,) = made.tiers
    assert tier is not None
