"""Features: the target's hidden states at chosen layers, concatenated.

Layers are indices of HF `hidden_states` everywhere in this project: 0 is the embedding output, L the output of
the last of L layers, behind the final norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.utils import output_capturing

# Before this function existed, a list of layers was counted without the embedding output.
_TAKES_INDICES = hasattr(output_capturing, "resolve_hidden_states_indices")


def features_request(layers: list[int]) -> dict[str, Any]:
    """Keyword arguments that make a target's forward return the hidden states of `layers`.

    Recent releases of transformers then keep only those; older ones, and older models, keep them all.
    """
    if not layers:
        return {}
    return {"output_hidden_states": list(layers) if _TAKES_INDICES else True}


def gather_features(outputs: Any, layers: list[int], like: Tensor) -> Tensor:
    """The hidden states of a forward over token ids `like` [B, N] that `features_request` asked for: [B, N, F].

    A model that keeps several streams of hidden states, [streams, B, N, width] (Gemma 3n), gives their mean.

    Raises:
        ValueError: the model's hidden states are shaped otherwise.
    """
    if not layers:
        return torch.zeros((*like.shape, 0), device=like.device)
    states = [outputs.hidden_states[index] for index in layers]
    states = [state.mean(0) if state.ndim == 4 and state.shape[1:3] == like.shape else state for state in states]
    if any(state.ndim != 3 for state in states):
        raise ValueError(
            "This target's hidden states have more than one stream per position and cannot be fused into features; it "
            "is not supported yet, call generate without assistant=."
        )
    return torch.cat([state.to(states[-1].device) for state in states], dim=-1)


def default_feature_layers(num_layers: int) -> list[int]:
    """The paper's three fused layers, as indices of HF `hidden_states` (DART, section 3.1)."""
    wanted = (2, num_layers // 2, num_layers - 3)
    return sorted({min(max(index, 1), num_layers) for index in wanted})
