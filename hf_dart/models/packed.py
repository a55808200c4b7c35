"""Attention of a whole tree under a mask without copies of the cache.

Stock's SDPA repeats keys and values for every query head of a group as soon as there is a mask: with 4 heads per
group the cache is written out four times larger in every layer of every round. Here the queries of a group stand
side by side instead (`attend_in_groups`), and keys and values are read where they lie. Trees attend by it in
the place of SDPA (`TreeAttention`); on CUDA a kernel is taken that makes no plan for each number of keys
(`masked_attention`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_dart.models.masked_attention import masked_attention


def attend_in_groups(
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, H / g, S, D]
    value: Tensor,  # [B, H / g, S, D']
    mask: Tensor,  # [B or 1, 1, Q, S]
    scaling: float | None = None,
) -> Tensor:  # [B, H, Q, D']
    """Attention under a mask where g heads share keys and values, which are read where they lie.

    The queries of a group stand side by side, as g · Q queries of one head under the mask repeated g times.
    """
    batch, heads, queries, width = query.shape
    groups = heads // key.shape[1]
    packed = query.reshape(batch, heads // groups, groups * queries, width)
    mask = mask if groups == 1 else mask.repeat(1, 1, groups, 1)
    return masked_attention(packed, key, value, mask, scaling).reshape(batch, heads, queries, -1)


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
    groups = query.shape[1] // key.shape[1]
    shared_mask = attention_mask is not None and attention_mask.shape[1] == 1
    if (groups == 1 and not query.is_cuda) or not shared_mask or dropout or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    assert attention_mask is not None
    return attend_in_groups(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None
