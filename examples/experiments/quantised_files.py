"""Write a model down as published quantised checkpoints are: FP8, MXFP4, GPTQ, compressed-tensors.

Each function saves `model`, which it may change, to `folder`: config.json with its `quantization_config`, and
model.safetensors. Linear layers are quantised, LM head and embeddings are not. Scales are those of the largest number
of a block; nothing is calibrated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

_FP8_MAX = 448.0
# 4 bits of floating point: the sign is the highest bit.
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_SCHEME_BLOCK = 32  # of compressed-tensors' schemes: 128 would not fit into small models


def save_fp8(model: Any, folder: Path, block: int = 32) -> None:
    """As DeepSeek V3's and Qwen's FP8 checkpoints: float8 weights, a scale for each square block of them.

    Args:
        block: divides both sizes of every layer.
    """
    state = _state(model)
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear) and name != "lm_head":
            blocks = part.weight.detach().float().unflatten(1, (-1, block)).unflatten(0, (-1, block))
            scale = blocks.abs().amax((1, 3), keepdim=True) / _FP8_MAX
            state[f"{name}.weight"] = (blocks / scale).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
            state[f"{name}.weight_scale_inv"] = scale[:, 0, :, 0].clone()
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    _write(model, folder, state, {**config, "modules_to_not_convert": ["lm_head"]})


def save_mxfp4(model: Any, folder: Path) -> None:
    """As gpt-oss's checkpoints: experts in 4 bits, 32 numbers to a scale, which is a power of two."""
    state = _state(model)
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        groups = state.pop(name).float().transpose(1, 2).unflatten(-1, (-1, 32))  # [experts, out, groups, 32]
        exponent = (groups.abs().amax(-1) / 6).clamp(min=2.0**-100).log2().ceil()
        scaled = groups / exponent.exp2()[..., None]
        codes = (scaled.abs()[..., None] - _FP4).abs().argmin(-1) + 8 * (scaled < 0)
        state[f"{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        state[f"{name}_scales"] = (exponent + 127).to(torch.uint8)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _write(model, folder, state, {"quant_method": "mxfp4", "modules_to_not_convert": skipped})


def save_gptq(model: Any, folder: Path, group: int = 32) -> None:
    """As GPTQ's checkpoints: 4 bits, eight to an int32 along the inputs, scales and zero points for each group.

    auto-round loads them without a GPU, as files of its own (`quant_method`) that are packed in that way.
    """
    state = _state(model)
    shifts = 4 * torch.arange(8, dtype=torch.int64)
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear) and name != "lm_head":
            groups = state.pop(f"{name}.weight").float().unflatten(1, (-1, group))  # [out, groups, group]
            scale = (groups.abs().amax(-1) / 7).half()
            codes = ((groups / scale.float()[..., None]).round() + 8).clamp(0, 15).flatten(1).T.long()  # [in, out]
            words = (codes.unflatten(0, (-1, 8)) << shifts[:, None]).sum(1)
            zeros = (torch.full((scale.shape[1], scale.shape[0] // 8, 8), 7) << shifts).sum(-1)  # less 1, as v1 is
            for kind, packed in (("qweight", words), ("qzeros", zeros)):
                state[f"{name}.{kind}"] = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
            state[f"{name}.scales"] = scale.T.contiguous()
    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": group}
    _write(model, folder, state, {**config, "sym": True, "data_type": "int"})


def save_compressed(model: Any, folder: Path, scheme: str, by_tensor: bool = False) -> None:
    """As llm-compressor's checkpoints.

    Args:
        scheme: a preset of compressed-tensors: W8A8, W4A16, FP8_DYNAMIC, NVFP4, ...
        by_tensor: one scale for all activations of a forward.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStrategy,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    chosen = preset_name_to_scheme(scheme, ["Linear"])
    for part in (chosen.weights, chosen.input_activations):
        if part is not None and part.group_size == 128:
            part.group_size = _SCHEME_BLOCK
        if part is not None and part.strategy == QuantizationStrategy.BLOCK:
            part.block_structure = [_SCHEME_BLOCK] * 2
    if by_tensor:
        chosen.input_activations.strategy, chosen.input_activations.dynamic = QuantizationStrategy.TENSOR, True
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": chosen}, ignore=["lm_head"]))
    for part in model.modules():
        if getattr(part, "quantization_scheme", None) is not None:
            _scale(part, part.quantization_scheme.weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


@torch.no_grad()
def _scale(part: Any, scheme: Any) -> None:
    """Set the scales that a module has for its weight and, where they are not found as it runs, its activations."""
    from compressed_tensors.quantization import QuantizationStrategy
    from compressed_tensors.quantization.utils import calculate_qparams

    weight, largest = part.weight, 30.0  # of activations
    if scheme.strategy == QuantizationStrategy.TENSOR:
        low, high = weight.min()[None], weight.max()[None]
    elif scheme.strategy == QuantizationStrategy.BLOCK:
        blocks = weight.unflatten(1, (-1, _SCHEME_BLOCK)).unflatten(0, (-1, _SCHEME_BLOCK))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        width = scheme.group_size if scheme.group_size else weight.shape[1]
        groups = weight.unflatten(1, (-1, width))
        low, high = groups.amin(-1), groups.amax(-1)
    whole = None
    if scheme.strategy == QuantizationStrategy.TENSOR_GROUP:
        whole = (_FP8_MAX * 6 / weight.abs().max()).reshape(1)
        part.weight_global_scale.copy_(whole)
        if hasattr(part, "input_global_scale"):
            part.input_global_scale.fill_(_FP8_MAX * 6 / largest)
    scale, zero = calculate_qparams(low, high, scheme, global_scale=whole)
    part.weight_scale.copy_(scale)
    if hasattr(part, "weight_zero_point"):
        part.weight_zero_point.copy_(zero)
    if hasattr(part, "input_scale"):
        part.input_scale.fill_(largest / _FP8_MAX)


def _state(model: Any) -> dict[str, Tensor]:
    """A copy of all weights; one that is tied is there once."""
    tied = model.all_tied_weights_keys
    return {name: weight.detach().clone() for name, weight in model.state_dict().items() if name not in tied}


def _write(model: Any, folder: Path, state: dict[str, Tensor], quantisation: dict[str, Any]) -> None:
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf8"))
    content = {**config, "architectures": [type(model).__name__], "quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf8")
    state = {name: weight.contiguous() for name, weight in state.items()}
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
