"""What a draft is trained on: pure functions of logits, one number per block.

`chunked` evaluates any of them a few blocks at a time, so that logits over the whole vocabulary are never
held for all blocks at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def annealing_weights(draft_length: int, gamma: float, device: torch.device | None = None) -> Tensor:
    """[d] weights gamma^(t - 1), scaled to sum 1 so that losses of different gamma and d compare."""
    weights = gamma ** torch.arange(draft_length, dtype=torch.float32, device=device)
    return weights / weights.sum()


def kl_divergence(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(target || draft) in nats over the last dimension: [..., V] and [..., V] to [...], in fp32."""
    draft, target = draft_logits.float().log_softmax(-1), target_logits.float().log_softmax(-1)
    return (target.exp() * (target - draft)).sum(-1)


def annealed_kl(draft_logits: Tensor, target_logits: Tensor, gamma: float = 0.6) -> Tensor:
    """DART's loss (arXiv 2601.19278, section 3.2): later draft tokens count less, by gamma per token.

    A draft token is worth nothing once an earlier one was wrong; gamma is about the chance that it was right.

    Args:
        draft_logits: [N, d, V] of N blocks.
        target_logits: [N, d, V] of the target at the positions that the blocks draft for.
        gamma: weight of a draft token relative to the one before.

    Returns:
        [N] weighted mean KL(target || draft) of each block, nats.
    """
    weights = annealing_weights(draft_logits.shape[-2], gamma, draft_logits.device)
    return (kl_divergence(draft_logits, target_logits) * weights).sum(-1)


def chunked(block_losses: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, goals: Tensor, chunk_size: int) -> Tensor:
    """The sum of `block_losses(hidden, goals)` over blocks, `chunk_size` blocks at a time.

    Each chunk's gradient is taken at once, while its logits [chunk, d, V] are at hand: memory over V is
    bounded by one chunk, and nothing is computed twice (the idea of Liger's fused linear cross-entropy).
    Gradients reach `hidden` only: weights used inside `block_losses`, such as the shared LM head, have to be
    frozen.

    Args:
        block_losses: hidden [n, d, H] and goals [n, ...] to losses [n].
        hidden: [N, d, H].
        goals: [N, ...] whatever `block_losses` needs beside the hidden states.
        chunk_size: blocks per chunk; 0 takes all in one ordinary pass, which also reaches weights.
    """
    if chunk_size <= 0:
        return block_losses(hidden, goals).sum()
    return _InChunks.apply(hidden, goals, block_losses, chunk_size)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, goals: Tensor, block_losses: Any, chunk_size: int) -> Tensor:
        wanted = hidden.requires_grad
        gradient = torch.empty_like(hidden) if wanted else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), chunk_size):
            part = slice(start, start + chunk_size)
            with torch.set_grad_enabled(wanted):
                leaf = hidden[part].detach().requires_grad_(wanted)
                loss = block_losses(leaf, goals[part]).sum()
            if gradient is not None:
                (gradient[part],) = torch.autograd.grad(loss, leaf)
            total += loss.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * scale, None, None, None


def agreement(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """[d] share of the N blocks in which both argmaxes of [N, d, V] agree, whatever came before."""
    return (draft_logits.argmax(-1) == target_logits.argmax(-1)).float().mean(0)
