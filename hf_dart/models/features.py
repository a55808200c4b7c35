"""Features: the target's hidden states at chosen layers, concatenated.

Layers are indices of HF `hidden_states`: 0 is the embedding output, L that of the last of L layers, after the norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def lm_head_of(target: PreTrainedModel) -> Any:
    """Return the LM head of a causal LM; None if it has none.

    Some multimodal models (Nemotron-H Omni) name none, and hold a language model that does.
    """
    named = target.get_output_embeddings()
    inner = (part for part in target.modules() if isinstance(part, PreTrainedModel) and part is not target)
    heads = (part.get_output_embeddings() for part in inner) if named is None else ()
    return next((head for head in heads if head is not None), named)


def lent_modules(target: PreTrainedModel) -> tuple[Any, Any]:
    """Return the input embeddings and the LM head that a target lends its drafter; raise if it has none."""
    embeddings, lm_head = target.get_input_embeddings(), lm_head_of(target)
    if embeddings is None or lm_head is None:
        raise ValueError(
            f"{type(target).__name__} has no input embeddings or no LM head to share; give a causal language model "
            "(AutoModelForCausalLM)."
        )
    return embeddings, lm_head


def table_of(embeddings: nn.Module) -> Any:
    """Return the module that tells the size of a target's input embeddings; PEFT's wrappers of it do not."""
    return next(part for part in embeddings.modules() if hasattr(part, "num_embeddings"))


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of tokens that a model has embeddings for."""
    return int(table_of(model.get_input_embeddings()).num_embeddings)


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


def states_at(states: Tensor, axis: int, nodes: Tensor) -> Tensor:
    """Hidden states [..., B, 1, H] of node `nodes[b]` [B] of each row, of [..., B, N, H] with rows at an axis."""
    rows = torch.arange(len(nodes), device=states.device)
    there = states.movedim((axis, axis + 1), (0, 1))[rows, nodes.to(states.device)]
    return there.unsqueeze(1).movedim((0, 1), (axis, axis + 1))
