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
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NARROW = (torch.float16, torch.bfloat16)
_ROW = 8
"""Numbers that kernels read of a mask at once: each of its rows has to begin at a multiple of as many."""


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


def masked_attention(
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, H, S, D]
    value: Tensor,  # [B, H, S, D']
    mask: Tensor,  # [B or 1, 1, Q, S], bool or added to scores
    scaling: float | None = None,
) -> Tensor:  # [B, H, Q, D']
    """`scaled_dot_product_attention`; on CUDA by the memory-efficient kernel, wherever that can take it.

    Left to itself, PyTorch takes cuDNN's on recent GPUs where numbers are bfloat16 or float16, which makes a plan for
    every new number of keys: 0.4 s each, and the text grows with every round.
    """
    if not query.is_cuda or not _is_for_efficient(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    if mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min / 2  # half of the least number, as in `Verifier.masks`
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, hidden)
    bias = aligned(mask.to(query.dtype)).expand(*query.shape[:3], key.shape[2])
    kernel: Any = torch.ops.aten._scaled_dot_product_efficient_attention
    mixed: Tensor = kernel(query, key, value, bias, False, scale=scaling)[0]
    return mixed


def _is_for_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if the kernel can take these tensors. Dtypes may differ under autocast, left to PyTorch."""
    fits = 8 if query.dtype in _NARROW else 4
    return (
        query.dtype in (*_NARROW, torch.float32)
        and query.dtype == key.dtype == value.dtype
        and all(part.shape[-1] % fits == 0 and part.stride(-1) == 1 for part in (query, key, value))
        and not torch.is_grad_enabled()
        and _efficient_allowed()
    )


@torch.compiler.assume_constant_result
def _efficient_allowed() -> bool:
    """Return True if the user has left the kernel enabled. Captured rounds are made again after a change."""
    return torch.backends.cuda.mem_efficient_sdp_enabled()


def aligned(mask: Tensor) -> Tensor:
    """Return a mask [..., S] in rows of which each begins where the kernel can read it."""
    if mask.stride(-1) == 1 and not any(step % _ROW for step in mask.stride()[:-1]):
        return mask
    return F.pad(mask, (0, -mask.shape[-1] % _ROW))[..., : mask.shape[-1]]
