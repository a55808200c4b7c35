"""Features: the target's hidden states at chosen layers, concatenated.

Layers are indices of HF `hidden_states` everywhere in this project: 0 is the embedding output, L the output of
the last of L layers, after the final norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

# Before this function existed, a list of layers was counted without the embedding output.
_TAKES_INDICES = hasattr(output_capturing, "resolve_hidden_states_indices")


def lm_head_of(target: PreTrainedModel) -> Any:
    """Return the LM head of a causal LM; None if it has none.

    Some multimodal models (Nemotron-H Omni) name none, and hold a language model that does.
    """
    named = target.get_output_embeddings()
    inner = (part for part in target.modules() if isinstance(part, PreTrainedModel) and part is not target)
    heads = (part.get_output_embeddings() for part in inner) if named is None else ()
    return next((head for head in heads if head is not None), named)


def layer_count(target: PreTrainedModel) -> int:
    """Return the number of layers of a target (a causal LM) whose hidden states it returns for text.

    The config of LongCat-Flash counts attentions, of which a layer has two; and Mllama passes over its layers of
    cross-attention where there is no image.
    """
    text = target.config.get_text_config(decoder=True)
    named = int(text.num_hidden_layers)
    inner = target.get_decoder() if hasattr(target, "get_decoder") else target
    lists = [len(part) for part in (inner or target).children() if isinstance(part, nn.ModuleList)]
    return (named if named in lists else max(lists, default=named)) - len(getattr(text, "cross_attention_layers", ()))


def default_feature_layers(num_layers: int) -> list[int]:
    """Return the paper's three fused layers, as indices of HF `hidden_states` (DART, section 3.1)."""
    wanted = (2, num_layers // 2, num_layers - 3)
    return sorted({min(max(index, 1), num_layers) for index in wanted})


def features_request(layers: list[int]) -> dict[str, Any]:
    """Keyword arguments that make a target's forward return the hidden states of `layers`.

    Recent releases of transformers then keep only those; older ones, and older models, keep them all.
    """
    if not layers:
        return {}
    return {"output_hidden_states": list(layers) if _TAKES_INDICES else True}


def row_axis(states: Tensor, rows: int, positions: int) -> int:
    """Return the axis of the rows in hidden states [..., B, N, H]; that of positions comes next.

    Several streams of hidden states come before them (AltUp, arXiv 2301.13310: Gemma 3n).

    Raises:
        ValueError: these are not rows and positions.
    """
    axis = states.ndim - 3
    if states.shape[axis : axis + 2] == (rows, positions):
        return axis
    raise ValueError(
        f"This target's hidden states of {rows} x {positions} positions are shaped {list(states.shape)}, of which rows "
        "and positions are not told; call generate without assistant=."
    )


def gather_features(outputs: Any, layers: list[int], like: Tensor) -> Tensor:
    """Return the hidden states of a forward over token ids `like` [B, N] that `features_request` asked for: [B, N, F].

    A model that keeps several streams of hidden states gives their mean.

    Raises:
        ValueError: the model's hidden states are shaped otherwise.
    """
    if not layers:
        return torch.zeros((*like.shape, 0), device=like.device)
    states = []
    for index in layers:
        found = outputs.hidden_states[index]
        axis = row_axis(found, *like.shape)
        states.append(found.mean(list(range(axis))) if axis else found)
    return torch.cat([state.to(states[-1].device) for state in states], dim=-1)


def merged_embeddings(target: PreTrainedModel, outputs: Any, ids: Tensor) -> Tensor | None:
    """Embeddings [B, N, E] of token ids `ids` [B, N] with those of images and sounds in their places.

    None where the first hidden states, which have to be among those of `outputs`, are no embeddings, not even of text:
    some models scale them, or add others.
    """
    merged, embeddings = gather_features(outputs, [0], ids), target.get_input_embeddings()
    known = embeddings(torch.where(ids < embeddings.num_embeddings, ids, 0)).to(merged.device)
    same = merged.shape == known.shape and bool((merged == known).all(-1).any())
    return merged if same else None


def states_at(states: Tensor, axis: int, nodes: Tensor) -> Tensor:
    """Hidden states [..., B, 1, H] of node `nodes[b]` [B] of each row, of [..., B, N, H].

    Args:
        axis: that of the rows (`row_axis`).
    """
    rows = torch.arange(len(nodes), device=states.device)
    there = states.movedim((axis, axis + 1), (0, 1))[rows, nodes.to(states.device)]
    return there.unsqueeze(1).movedim((0, 1), (axis, axis + 1))
