"""A safe `LoraConfig` from an adapter's adapter_config.json: numbers and names of plain LoRA, and its weights' sizes.

PEFT's own configs ask for more: modules to import, packages, patterns to run, memory, other weights under the adapter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.hub.download import ADAPTER_CONFIG

# Fields that say nothing about the weights.
_BOOKS = {"peft_type", "peft_version", "auto_mapping", "task_type", "inference_mode"}


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.]{1,200}", value) is not None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 2**31


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_name, value)))


def _are_numbers_by_name(value: Any) -> bool:
    if not isinstance(value, dict):
        return value is None
    return all(map(_is_name, value)) and all(map(_is_number, value.values()))


_PLAIN: dict[str, Callable[[Any], bool]] = {
    "peft_type": lambda value: value == "LORA",
    "peft_version": _is_text,
    "auto_mapping": lambda value: True,
    "task_type": _is_text,
    "inference_mode": _is_flag,
    "base_model_name_or_path": _is_text,
    "revision": _is_text,
    "r": lambda value: type(value) is int and 0 < value < 2**31,
    "lora_alpha": _is_number,
    "lora_dropout": _is_number,
    "bias": lambda value: value in ("none", "all", "lora_only"),
    "fan_in_fan_out": _is_flag,
    "use_rslora": _is_flag,
    "use_dora": _is_flag,
    "lora_bias": _is_flag,
    # Other values change the weights under the adapter, or need packages.
    "init_lora_weights": lambda value: _is_flag(value) or value in ("gaussian", "orthogonal"),
    "target_modules": lambda value: isinstance(value, str) or (value is not None and _are_names(value)),
    "modules_to_save": _are_names,
    "rank_pattern": _are_numbers_by_name,
    "alpha_pattern": _are_numbers_by_name,
}
"""Fields of an adapter that are taken from a file, and what they may hold; others only what PEFT writes by default."""


def lora_of(head: PreTrainedModel, path: str, content: dict[str, Any], state: dict[str, Tensor]) -> LoraConfig:
    """Build the config of an adapter for PEFT: fields that are only numbers and names, and sizes that its weights have.

    Raises:
        ValueError: a field asks for more: other code, packages, patterns or memory.
    """
    usual = LoraConfig().to_dict()
    for name, value in content.items():
        allowed = _PLAIN.get(name, lambda value, name=name: value in (None, False, usual.get(name)))
        if not allowed(value):
            raise ValueError(
                f"The {ADAPTER_CONFIG} in {path} says {name}: {value!r:.80}, which hf_dart does not load; give an "
                "adapter of plain LoRA."
            )
    targets = {key.partition(".lora_")[0] for key in state if ".lora_" in key}
    named = content.get("target_modules")
    # A pattern is not run: the weights say which modules it found.
    wrong = set() if isinstance(named, str) else {path for path in _linears(head) if _ends_in(path, named)} ^ targets
    ranks = content.get("rank_pattern") or {}
    for target in targets:
        own = [rank for name, rank in ranks.items() if _ends_in(target, [name])]
        rank = [*own, content.get("r", LoraConfig.r)][0]
        weight = state.get(f"{target}.lora_A.weight")
        if target not in _linears(head) or weight is None or weight.shape != (rank, _linears(head)[target]):
            wrong.add(target)
    if wrong or not targets:
        raise ValueError(
            f"The adapter in {path} does not fit this head, or the r of its {ADAPTER_CONFIG} (first difference: "
            f"{min(wrong, default='no module')}); load it on the head that it was trained for."
        )
    known = {name: value for name, value in content.items() if name in _PLAIN.keys() - _BOOKS and value is not None}
    try:
        return LoraConfig(**{**known, "target_modules": sorted(targets) if isinstance(named, str) else named})
    except (TypeError, KeyError, ValueError) as error:
        words = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"The {ADAPTER_CONFIG} in {path} is not one of PEFT ({words}); fetch it again.") from error


def _linears(head: PreTrainedModel) -> dict[str, int]:
    """Return the linear modules that LoRA can be put on, with the width of their input."""
    bare = ((path, getattr(part, "base_layer", part)) for path, part in head.named_modules())
    return {path: part.in_features for path, part in bare if isinstance(part, nn.Linear) and ".base_layer" not in path}


def _ends_in(path: str, names: Any) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names or ())
