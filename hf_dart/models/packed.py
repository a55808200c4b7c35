"""Attention of a whole tree under a mask without copies of the cache.

Stock's SDPA repeats keys and values for every query head of a group as soon as there is a mask: with 4 heads per
group the cache is written out four times larger in every layer of every round. Here the queries of a group stand
side by side instead (`attend_in_groups`), and keys and values are read where they lie. Trees attend by it in
the place of SDPA (`TreeAttention`); on CUDA a kernel is taken that makes no plan for each number of keys
(`masked_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_dart.models.masked_attention import aligned, masked_attention

NODES = "hf_dart_nodes"
"""The argument that targets hand down to it when nodes of several rows are run as one (`engine.budget`)."""

MASKS = "hf_dart_masks"
"""The argument that targets hand down to it with pairs of a mask and the same mask `for_groups`, made once a round."""


def attend_in_groups(
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, H / g, S, D]
    value: Tensor,  # [B, H / g, S, D']
    mask: Tensor,  # [B or 1, 1, Q, S], or `for_groups` of it
    scaling: float | None = None,
) -> Tensor:  # [B, H, Q, D']
    """Attention under a mask where g heads share keys and values, which are read where they lie.

    The queries of a group stand side by side, as g · Q queries of one head under the mask repeated g times.
    """
    batch, heads, queries, width = query.shape
    groups = heads // key.shape[1]
    if mask.shape[2] == queries:
        mask = for_groups(mask, groups)
    packed = query.reshape(batch, heads // groups, groups * queries, width)
    return masked_attention(packed, key, value, mask, scaling).reshape(batch, heads, queries, -1)


def for_groups(mask: Tensor, groups: int) -> Tensor:
    """A mask [B or 1, 1, Q, S] of queries as one of groups of g queries [B or 1, 1, g Q, S]."""
    mask = mask if groups == 1 else mask.repeat(1, 1, groups, 1)
    return aligned(mask) if mask.is_cuda and mask.dtype != torch.bool else mask


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, H / g, S, D]
    value: Tensor,  # [B, H / g, S, D']
    attention_mask: Tensor | None,  # [B, 1, N, S]
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [B, N, H, D']
    """Attention with the interface of transformers' `sdpa_attention_forward`.

    Queries under no mask are not taken in groups, nor those without a mask that all heads share.
    """
    nodes, groups = kwargs.pop(NODES, None), query.shape[1] // key.shape[1]
    for_all = _made_before(attention_mask, kwargs.pop(MASKS, ()), groups)
    if nodes is not None:
        return _of_shared_trees(query, key, value, attention_mask, for_all, nodes, scaling), None
    shared_mask = attention_mask is not None and attention_mask.shape[1] == 1
    if (groups == 1 and not query.is_cuda) or not shared_mask or dropout or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    assert for_all is not None
    return attend_in_groups(query, key, value, for_all, scaling).transpose(1, 2).contiguous(), None


def _made_before(mask: Tensor | None, pairs: Sequence[tuple[Tensor, Tensor]], groups: int) -> Tensor | None:
    """The layer's mask for groups, if it was made for all layers; else the mask as it is."""
    return next((made for own, made in pairs if own is mask and made.shape[2] == groups * own.shape[2]), mask)


def _of_shared_trees(
    query: Tensor,  # [1, H, M, D]
    key: Tensor,  # [B, H / g, S, D]
    value: Tensor,  # [B, H / g, S, D']
    mask: Tensor | None,  # [B, 1, N, S]
    for_all: Tensor | None,  # the same, or for groups
    nodes: Tensor,  # [M] of B N
    scaling: float | None,
) -> Tensor:  # [1, M, H, D']
    """Queries of nodes here and there in B trees (`budget`), which go back into their trees for this."""
    assert mask is not None
    assert for_all is not None
    batch, size = mask.shape[0], mask.shape[2]
    heads, width = query.shape[1], query.shape[3]
    trees = query.new_zeros(batch * size, heads, width).index_copy(0, nodes, query[0].transpose(0, 1))
    mixed = attend_in_groups(trees.view(batch, size, heads, width).transpose(1, 2), key, value, for_all, scaling)
    return mixed.transpose(1, 2).flatten(0, 1)[nodes][None]
