"""Losses over the vocabulary a few blocks at a time: logits are never held for all blocks at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def chunked(
    block_losses: Callable[..., Tensor],  # hidden [n, d, H] and goals [n, ...] to losses [n]
    hidden: Tensor,  # [N, d, H]
    *goals: Tensor,  # [N, ...] each
    chunk_size: int,  # in blocks; 0 takes all in one ordinary pass, which also reaches weights
) -> Tensor:
    """Return the sum of `block_losses(hidden, *goals)` over blocks, `chunk_size` blocks at a time.

    Each chunk's gradient is taken at once, while its logits [chunk, d, V] are at hand: memory over V is bounded by one
    chunk, and nothing is computed twice (the idea of Liger's fused linear cross-entropy). Gradients reach `hidden`
    only: weights used inside `block_losses`, such as the shared LM head, have to be frozen.
    """
    if chunk_size <= 0:
        return block_losses(hidden, *goals).sum()
    return _InChunks.apply(block_losses, chunk_size, hidden, *goals)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block_losses: Any, chunk_size: int, hidden: Tensor, *goals: Tensor) -> Tensor:
        wanted = hidden.requires_grad
        gradient = torch.empty_like(hidden) if wanted else None
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        for start in range(0, len(hidden), chunk_size):
            part = slice(start, start + chunk_size)
            with torch.set_grad_enabled(wanted):
                leaf = hidden[part].detach().requires_grad_(wanted)
                loss = block_losses(leaf, *(goal[part] for goal in goals)).sum()
            if gradient is not None:
                (gradient[part],) = torch.autograd.grad(loss, leaf)
            total += loss.detach()
        ctx.save_for_backward(gradient)
        ctx.goals = len(goals)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (None, None, gradient * scale, *[None] * ctx.goals)
