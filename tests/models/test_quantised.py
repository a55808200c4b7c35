"""Quantised targets: weights alone are exact; what rounds on the way is measured, and refused where tokens share it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.cases import GREEDY, MODES, batch, replay
from support.compare import assert_identical, run, tally
from support.sentences import refused
from support.tiny import tiny_head, tiny_target
from support.tiny_training import tiny_trainer
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dart import attach
from hf_dart.bench.auditing import audit
from hf_dart.bench.pair import load_pair
from hf_dart.bench.speed import Settings
from hf_dart.cli import main
from hf_dart.models.quantised import rounding_of
from hf_dart.models.trial import check_verification, forget

EXACT = tally("float64, quantised weights")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft 0.21
PROMPTS = ["import os\n\n\ndef join(left, right):\n    ", "class Reader:\n    def __init__(self, path) -> None:\n"]


class Int8Linear(nn.Module):
    """Weights in 8 bits with a scale for each row; activations as they come."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.rounded(x), self.weight.to(x.dtype) * self.scale, self.bias)

    def rounded(self, x: Tensor) -> Tensor:
        return x


class PerToken(Int8Linear):
    """Each token's activations in 8 bits, too."""

    def rounded(self, x: Tensor) -> Tensor:
        return rounded(x)


class PerTensor(Int8Linear):
    """By one scale for all tokens of a call."""

    def rounded(self, x: Tensor) -> Tensor:
        return rounded_together(x)


class PerTensorFloat8(Int8Linear):
    """The same in 8 bits of floating point."""

    def rounded(self, x: Tensor) -> Tensor:
        scale = x.abs().max().clamp(min=1e-5) / 448
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def to_8_bits(x: Tensor, largest: Tensor) -> Tensor:
    scale = largest.clamp(min=1e-5) / 127  # the embedding of padding is 0
    return (x / scale).round() * scale


def rounded(x: Tensor) -> Tensor:
    return to_8_bits(x, x.abs().amax(-1, keepdim=True))


def rounded_together(x: Tensor) -> Tensor:
    return to_8_bits(x, x.abs().max())


def quantised(kind: Callable[[nn.Linear], nn.Module], dtype: torch.dtype = torch.float64) -> Any:
    """A tiny target whose layers are linear in that way."""
    target = tiny_target("qwen3", dtype=dtype)
    for name, part in [*target.named_modules()]:
        if isinstance(part, nn.Linear) and name != "lm_head":
            target.set_submodule(name, kind(part))
    return target


@pytest.mark.parametrize("size", [1, 4])
def test_weights_in_8_bits(size: int) -> None:
    target, inputs = quantised(Int8Linear), batch(size, "sdpa")
    assert rounding_of(target) == torch.float64
    attach(target)
    for mode in ("greedy", "T=1"):
        options = {**MODES[mode], "max_new_tokens": 24}
        known = replay(target, inputs, misses=[0.1, 0.4, 0.3, 0.5][:size], **options)
        assert_identical(target, known, inputs, into=EXACT, **options)
        assert known.last_stats.tau > 1.3
        assert_identical(target, tiny_head(target), inputs, **options)


@pytest.mark.parametrize("kind", [PerTensor, PerTensorFloat8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scales_that_tokens_share(kind: Any, dtype: torch.dtype) -> None:
    target = quantised(kind, dtype)
    plain = run(target, batch(1, "sdpa"), 0, **GREEDY).sequences
    for attempt in (attach, check_verification, tiny_head):
        words = f"largest of all tokens.*{kind.__name__}.*assistant="
        refused(lambda attempt=attempt: attempt(target), ValueError, words)
        assert "generate" not in vars(target)
    assert torch.equal(run(target, batch(1, "sdpa"), 0, **GREEDY).sequences, plain)


@pytest.mark.parametrize("way", ["forward", "hook"])
@pytest.mark.parametrize("shared", [False, True])
def test_rounding_within_plain_modules(way: str, shared: bool) -> None:
    """compressed-tensors leaves the modules as they are and gives each another forward; the second one is another."""
    target = tiny_target("qwen3")
    layers = target.model.layers
    for layer, by_tensor in zip(layers, [False, shared, *[False] * len(layers)], strict=False):
        part, function = layer.mlp.down_proj, rounded if not by_tensor else rounded_together
        part.scheme = str(by_tensor)
        if way == "hook":
            part.register_forward_pre_hook(lambda _, inputs, function=function: (function(inputs[0]),))
        else:
            part.forward = lambda x, part=part, function=function: type(part).forward(part, function(x))
    assert rounding_of(target) == torch.bfloat16
    forget(target)
    if shared:
        refused(lambda: attach(target), ValueError, "largest of all tokens.*Linear")
    else:
        attach(target)


def test_modules_put_in_later_are_looked_at() -> None:
    target = tiny_target("qwen3")
    head = tiny_head(target)
    assert_identical(target, head, batch(1, "sdpa"), **GREEDY)
    layer = target.model.layers[0].mlp
    layer.down_proj = PerTensor(layer.down_proj)
    refused(lambda: run(target, batch(1, "sdpa"), 0, **GREEDY, assistant=head), ValueError, "PerTensor")


@pytest.mark.parametrize(
    ("kind", "dtype", "rounds_like"),
    [
        (PerToken, torch.float64, torch.bfloat16),
        (PerToken, torch.float32, torch.bfloat16),
        (PerToken, torch.float16, torch.bfloat16),
        (PerToken, torch.bfloat16, torch.bfloat16),
        (Int8Linear, torch.float32, torch.float32),
        (Int8Linear, torch.float16, torch.float16),
    ],
)
def test_what_a_target_rounds_like(kind: Any, dtype: torch.dtype, rounds_like: torch.dtype) -> None:
    assert rounding_of(quantised(kind, dtype)) == rounds_like


def test_lora_beside_the_weights() -> None:
    """PEFT knows what it may replace by type."""
    target = quantised(Int8Linear)
    plain = run(target, batch(1, "sdpa"), 0, **GREEDY).sequences
    config = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    wrapped = get_peft_model(target, config).double().eval()
    head = tiny_head(wrapped)
    for inputs in (batch(1, "sdpa"), batch(4, "sdpa")):
        assert_identical(wrapped, head, inputs, **GREEDY)
    assert not torch.equal(run(wrapped, batch(1, "sdpa"), 0, **GREEDY).sequences, plain)


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("package", "config", "dtype", "rounds_like"),
    [
        ("bitsandbytes", NF4, "float32", "bfloat16"),
        ("bitsandbytes", NF4, "bfloat16", "bfloat16"),
        ("bitsandbytes", {"load_in_8bit": True}, "float32", "bfloat16"),
        ("bitsandbytes", {"load_in_8bit": True}, "bfloat16", "bfloat16"),
        ("torchao.quantization", "Int8WeightOnlyConfig", "float32", "float32"),
        ("torchao.quantization", "Int8WeightOnlyConfig", "bfloat16", "bfloat16"),
        ("torchao.quantization", "IntxWeightOnlyConfig", "float32", "float32"),
        ("torchao.quantization", "Float8WeightOnlyConfig", "float32", "float32"),
        ("torchao.quantization", "Int8DynamicActivationInt8WeightConfig", "float32", "bfloat16"),
        ("torchao.quantization", "Int8DynamicActivationIntxWeightConfig", "bfloat16", "bfloat16"),
        ("optimum.quanto", {"quant_method": "quanto", "weights": "int8"}, "float32", "float32"),
    ],
)
def test_packages_that_quantise(
    package: str,
    config: Any,
    dtype: str,
    rounds_like: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`hf-dart audit` of the packaged pair, quantised as it is loaded."""
    kinds = pytest.importorskip(package)
    if isinstance(config, str):
        from transformers import TorchAoConfig

        config = TorchAoConfig(getattr(kinds, config)()).to_dict()
    words = ["audit", *PROMPTS, "--new-tokens", "32", "--dtype", dtype, "--quantization", json.dumps(config)]
    assert main([*words, "--json", str(tmp_path / "audit.json")]) == 0
    report = json.loads((tmp_path / "audit.json").read_text(encoding="utf8"))
    assert report["rounding"] == rounds_like
    assert report["compared"]["rows"] == 8
    shown = capsys.readouterr().out
    assert (f"round like {rounds_like}" in shown) == (rounds_like != dtype)


@pytest.mark.matrix
def test_qlora(tmp_path: Path) -> None:
    """A LoRA over 4 bits, and a head that is trained on it."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    pair = load_pair(dtype="bfloat16", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = get_peft_model(pair.model, config).eval()
    ids = [pair.tokenizer(text)["input_ids"] for text in PROMPTS]
    report = audit(pair._replace(model=wrapped), ids, Settings(prompts=2, new_tokens=32))
    assert report["passed"], report["findings"]
    texts = [torch.tensor((one * 4)[:40]) for one in ids * 4]
    rows = [{"input_ids": text, "documents": torch.zeros_like(text)} for text in texts]
    head = type(pair.head).from_target(wrapped, draft_length=4).float()
    assert tiny_trainer(tmp_path, head, wrapped, rows).train().training_loss > 0
    assert pair.head.last_stats.tau > 1
