"""A safe `LoraConfig` from an adapter's adapter_config.json: numbers and names of plain LoRA, and its weights' sizes.

PEFT's own configs ask for more: modules to import, packages, patterns to run, memory, other weights under the adapter.
"""

from __future__ import annotations

import re
from typing import Any

from peft import LoraConfig
from torch import Tensor

from hf_dart.hub.checkpoint import refused
from hf_dart.hub.download import ADAPTER_CONFIG

# Fields that are handed to PEFT if they hold numbers, names, or lists or tables of them; of others those that PEFT has
# by default are taken, or say nothing about the weights.
_PLAIN = {"r", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora", "use_dora", "lora_bias", "modules_to_save",
          "rank_pattern", "alpha_pattern", "bias"}  # fmt: skip
_NOTES = {"peft_version", "auto_mapping", "task_type", "inference_mode", "base_model_name_or_path", "revision"}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    # Other values change the weights under the adapter, or need packages.
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}


def _is_plain(value: Any) -> bool:
    """Return True for numbers, names, and lists and tables of them."""
    if isinstance(value, dict):
        return _is_plain([*value]) and all(type(one) in (int, float) and _is_plain(one) for one in value.values())
    if isinstance(value, list):
        return all(isinstance(one, str) and _is_plain(one) for one in value)
    if isinstance(value, str):
        return re.fullmatch(r"[\w.]{1,200}", value) is not None
    return value is None or (isinstance(value, (int, float)) and 0 <= value < 2**31)


def _is_taken(name: str, value: Any, usual: Any) -> bool:
    if name == "target_modules":
        return isinstance(value, str) or _is_plain(value)  # a pattern is not run
    if name in _CHOICES:
        return any(type(value) is type(one) and value == one for one in _CHOICES[name])
    return name in _NOTES or value in (None, False, usual) or (name in _PLAIN and _is_plain(value))


def lora_of(path: str, content: dict[str, Any], state: dict[str, Tensor]) -> LoraConfig:
    """Build the config of an adapter for PEFT; raise a `ValueError` for fields that are more than numbers and names."""
    usual = LoraConfig().to_dict()
    for name, value in content.items():
        if not _is_taken(name, value, usual.get(name)):
            raise ValueError(
                f"The {ADAPTER_CONFIG} in {path} says {name}: {value!r:.80}, which hf_dart does not load; give an "
                "adapter of plain LoRA."
            )
    named = content.get("target_modules")
    if isinstance(named, str):  # a pattern is not run: the weights say which modules it found
        named = sorted({key.partition(".lora_")[0] for key in state if ".lora_" in key})
    taken = {*_PLAIN, "base_model_name_or_path", "revision"}
    known = {name: value for name, value in content.items() if name in taken and value is not None}
    with refused(f"The {ADAPTER_CONFIG} in {path}", "fetch it again"):
        return LoraConfig(**{**known, "target_modules": named})
