"""Writing an `EagleDrafter` in the original format of EAGLE-3 (`hf_dart.interop.eagle3`)."""

from __future__ import annotations

from pathlib import Path

from hf_dart.drafters.eagle.drafter import EagleDrafter
from hf_dart.drafters.published import eagle_layers
from hf_dart.interop import eagle3


def write_eagle3(drafter: EagleDrafter, folder: str | Path) -> None:
    """Write a head as SafeAILab's code, SGLang and vLLM read it: config.json and model.safetensors.

    Args:
        drafter: bound to its target, whose LM head is copied if it has none of its own.
        folder: is made if there is none.

    Raises:
        ValueError: that code knows no such head; the message says why.
    """
    weights = {eagle_layers(name): weight for name, weight in drafter.state_dict().items()}
    eagle3.write_eagle3(drafter.config, weights, folder, lm_head=drafter.shared.lm_head)
