"""Attention under a mask, by the kernel that suits masks which change all the time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_NARROW = (torch.float16, torch.bfloat16)
_ROW = 8
"""Numbers that kernels read of a mask at once: each of its rows has to begin at a multiple of as many."""


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
        hidden = torch.finfo(query.dtype).min / 2  # as in `Verifier.masks`
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, hidden)
    bias = aligned(mask.to(query.dtype)).expand(*query.shape[:3], key.shape[2])
    kernel: Any = torch.ops.aten._scaled_dot_product_efficient_attention
    mixed: Tensor = kernel(query, key, value, bias, False, scale=scaling)[0]
    return mixed


def _is_for_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Can the kernel take them? Under autocast their types may differ, which PyTorch's own function sees to."""
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
    """Or has the user turned it off? Captured rounds are made again after that."""
    return torch.backends.cuda.mem_efficient_sdp_enabled()


def aligned(mask: Tensor) -> Tensor:
    """The same [..., S] in rows of which each begins where the kernel can read it."""
    if mask.stride(-1) == 1 and not any(step % _ROW for step in mask.stride()[:-1]):
        return mask
    return F.pad(mask, (0, -mask.shape[-1] % _ROW))[..., : mask.shape[-1]]
