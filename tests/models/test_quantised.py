"""Quantised targets: weights alone are exact; what rounds on the way is measured, and refused where tokens share it.

Modules of the tests' own, packages that quantise as they load, and published files through plain `from_pretrained`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from support.cases import GREEDY, MODES, batch, replay
from support.compare import assert_identical, run, tally
from support.scripts import experiment
from support.sentences import refused
from support.tiny import PAD, prompts, tiny_head, tiny_target
from support.tiny_training import tiny_trainer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from hf_dart import attach
from hf_dart.bench.auditing import audit
from hf_dart.bench.pair import Pair, load_pair
from hf_dart.bench.speed import Settings
from hf_dart.cli import main
from hf_dart.models.quantised import rounding_of
from hf_dart.models.trial import check_verification, forget

EXACT = tally("float64, quantised weights")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FILES = experiment("quantised_files")
SMALL = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
NEWEST = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="of older releases, kernels are called otherwise, and experts stay in bfloat16",
)
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft 0.21
PROMPTS = ["import os\n\n\ndef join(left, right):\n    ", "class Reader:\n    def __init__(self, path) -> None:\n"]


def to_8_bits(x: Tensor, largest: Tensor) -> Tensor:
    scale = largest.clamp(min=1e-5) / 127  # the embedding of padding is 0
    return (x / scale).round() * scale


def per_token(x: Tensor) -> Tensor:
    """Each token's activations in 8 bits."""
    return to_8_bits(x, x.abs().amax(-1, keepdim=True))


def per_tensor(x: Tensor) -> Tensor:
    """By one scale for all tokens of a call."""
    return to_8_bits(x, x.abs().max())


def per_tensor_float8(x: Tensor) -> Tensor:
    """The same in 8 bits of floating point."""
    scale = x.abs().max().clamp(min=1e-5) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


class Int8Linear(nn.Module):
    """Weights in 8 bits with a scale for each row; activations as they come, or `rounded`."""

    def __init__(self, linear: nn.Linear, rounded: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.rounded = rounded
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.rounded(x), self.weight.to(x.dtype) * self.scale, self.bias)


def quantised(dtype: torch.dtype = torch.float64, *rounded: Callable[[Tensor], Tensor]) -> Any:
    """A tiny target whose layers are linear in that way."""
    target = tiny_target("qwen3", dtype=dtype)
    for name, part in [*target.named_modules()]:
        if isinstance(part, nn.Linear) and name != "lm_head":
            target.set_submodule(name, Int8Linear(part, *rounded))
    forget(target)
    return target


def assert_exact(target: Any, attention: str = "sdpa") -> None:
    attach(target)
    for size, mode in ((1, "greedy"), (1, "T=1"), (4, "greedy"), (4, "T=1")):
        inputs, options = batch(size, attention), {**MODES[mode], "max_new_tokens": 24}
        known = replay(target, inputs, misses=[0.1, 0.4, 0.3, 0.5][:size], **options)
        assert_identical(target, known, inputs, into=EXACT, **options)
        assert known.last_stats.tau > 1.3
        assert_identical(target, tiny_head(target), inputs, **options)


def test_weights_in_8_bits() -> None:
    target = quantised()
    assert_exact(target)
    for dtype in DTYPES:
        assert rounding_of(quantised(dtype)) == dtype
        assert rounding_of(quantised(dtype, per_token)) == torch.bfloat16


@pytest.mark.parametrize("rounded", [per_tensor, per_tensor_float8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_that_tokens_share(rounded: Any, dtype: torch.dtype) -> None:
    target = quantised(dtype, rounded)
    plain = run(target, batch(1, "sdpa"), 0, **GREEDY).sequences
    for attempt in (attach, check_verification, tiny_head):
        words = "largest of all tokens.*Int8Linear.*assistant="
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
        part, function = layer.mlp.down_proj, per_tensor if by_tensor else per_token
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
    package: str, config: Any, dtype: str, rounds_like: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


def loaded(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    forget(target)
    return target.eval()


def passes(target: Any) -> dict[str, Any]:
    """An audit's report on a random head and prompts."""
    texts = [ids[ids != PAD].tolist() for ids in prompts([9, 5, 7])["input_ids"]]
    pad: Any = type("Tokenizer", (), {"pad_token_id": PAD})
    report = audit(Pair(target, tiny_head(target), pad, "tiny", "tiny"), texts, Settings(prompts=3, new_tokens=24))
    assert report["compared"]["rows"] == 12
    assert report["passed"], report["findings"]
    return report


def trains(target: Any, folder: Path) -> None:
    """A head learns on it, and drafts."""
    head = tiny_head(target).float()
    rows = [
        {"input_ids": prompts([24], seed=seed)["input_ids"][0], "documents": torch.zeros(24, dtype=torch.long)}
        for seed in range(8)
    ]
    before = [weight.clone() for weight in target.parameters()]
    assert tiny_trainer(folder, head, target, rows, max_steps=2).train().training_loss > 0
    assert all(map(torch.equal, before, target.parameters()))
    assert run(target, batch(1, "sdpa"), 0, **GREEDY, assistant=head).sequences.shape[1] > 7


def saved(kind: str, folder: Path, dtype: torch.dtype) -> Any:
    """The random target whose files they are. What is not quantised stays in `dtype`, whatever it is loaded in."""
    family, attention = ("qwen3", "sdpa") if kind == "fp8" else ("gpt_oss", "eager")
    source = tiny_target(family, attention, dtype=dtype, **SMALL)
    if kind == "fp8":
        FILES.save_fp8(source, folder, block=16)
    else:
        FILES.save_mxfp4(source, folder)
    return source


@pytest.mark.parametrize("kind", ["fp8", pytest.param("mxfp4", marks=NEWEST)])
def test_files_that_a_cpu_unpacks(kind: str, tmp_path: Path) -> None:
    """transformers loads FP8 and MXFP4 on a CPU as plain weights."""
    plain = dict(saved(kind, tmp_path, torch.float64).named_parameters())
    target = loaded(tmp_path)
    weights = dict(target.named_parameters())
    assert weights.keys() == plain.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.float64, name
        largest = plain[name].abs().max()
        assert (weight - plain[name]).abs().max() <= largest * (0.2 if kind == "mxfp4" else 0.04), name
    assert any(not torch.equal(weights[name], plain[name]) for name in weights)
    assert_exact(target, "eager")


def fp8_linear(x: Tensor, weight: Tensor, scales: Tensor, block: Any, bias: Any, *rest: Any) -> Tensor:
    """What the kernels of a GPU compute: a scale for each group of a token's activations, and for each block."""
    groups = x.float().unflatten(-1, (-1, block[1]))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    rounded = ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
    whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (rounded @ (weight.float() * whole).T).to(x.dtype)


@pytest.fixture
def on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A target in FP8 that stays so, with a function in place of the kernel."""
    from transformers.integrations import finegrained_fp8
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    saved("fp8", tmp_path, torch.float32)
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)

    def load(kernel: Any, dtype: torch.dtype) -> Any:
        monkeypatch.setattr(finegrained_fp8, "fp8_linear", kernel)
        target = loaded(tmp_path, dtype)
        assert target.model.layers[0].mlp.down_proj.weight.dtype == torch.float8_e4m3fn
        return target

    return load


@NEWEST
def test_activations_in_fp8_by_groups_of_a_token(on_a_gpu: Any, tmp_path: Path) -> None:
    target = on_a_gpu(fp8_linear, torch.float32)
    assert passes(target)["rounding"] == "bfloat16"
    trains(target, tmp_path / "head")


@NEWEST
def test_fp8_without_its_kernel(on_a_gpu: Any) -> None:
    """transformers' own sentence names what is to be installed. With it, FP8 layers are not copied."""
    target = on_a_gpu(fp8_linear, torch.float32)
    refused(lambda: tiny_head(target, copy_layer=0), ValueError, "quantized or offloaded and cannot be copied")

    def missing(*args: Any) -> Tensor:
        raise ImportError("finegrained-fp8 kernel unavailable: pip install kernels")

    refused(lambda: attach(on_a_gpu(missing, torch.bfloat16)), ValueError, "plain text.*ImportError.*install kernels")


def in_scheme(scheme: str) -> Callable[..., None]:
    return partial(FILES.save_compressed, scheme=scheme)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("package", "save", "rounds_like"),
    [
        ("compressed_tensors", in_scheme("W8A8"), "bfloat16"),
        ("compressed_tensors", in_scheme("W4A16"), "float32"),
        ("compressed_tensors", in_scheme("W4A8"), "bfloat16"),
        ("compressed_tensors", in_scheme("FP8"), "bfloat16"),
        ("compressed_tensors", in_scheme("FP8_DYNAMIC"), "bfloat16"),
        ("compressed_tensors", in_scheme("FP8_BLOCK"), "bfloat16"),
        # auto-round has a target compute in float16 where it was to be float32.
        ("auto_round", FILES.save_gptq, "float16"),
    ],
)
def test_files_that_packages_read(package: str, save: Any, rounds_like: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    save(tiny_target("qwen3", dtype=torch.float32, **SMALL), tmp_path)
    target = loaded(tmp_path, torch.float32)
    assert type(target.model.layers[0].mlp.down_proj) is not nn.Linear or package == "compressed_tensors"
    assert passes(target)["rounding"] == rounds_like
    trains(loaded(tmp_path, torch.float32), tmp_path / "head")


@pytest.mark.matrix
def test_compressed_tensors_with_scales_that_tokens_share(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    FILES.save_compressed(tiny_target("qwen3", dtype=torch.float32, **SMALL), tmp_path, "W8A8", by_tensor=True)
    refused(lambda: attach(loaded(tmp_path, torch.float32)), ValueError, "largest of all tokens")
