"""Selectors of DFlash's variants: convolutions over the block (DFlash2), scores of pairs of tokens.

A block's logits know each position, not each other. DFlash2 scores a token after another by the hidden state between
them; DSpark (arXiv 2607.05147) by one low-rank matrix, which the hidden state may gate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BlockConvolution(nn.Module):
    """A causal convolution in front of a part of a layer and one after it, which read the block alone.

    Kernels are those learned per channel and, added to them, ones that the input gives per group of channels.

    Args:
        hidden_size: H.
        taps: k, how many entries it reads, its own included.
        group_size: channels that share what the input gives.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps, self.group_size = taps, group_size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * (hidden_size // group_size), bias=False)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first convolution of x [B, Q, H], and the kernels [B, Q, k, G] that x gives for the second."""
        given = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        return self._convolve(x, given[..., 0, :, :], self.base_kernel[0]), given[..., 1, :, :]

    def after(self, x: Tensor, given: Tensor) -> Tensor:
        """Return the second convolution, of the layer part's output [B, Q, H]."""
        return self._convolve(x, given, self.base_kernel[1])

    def _convolve(self, x: Tensor, given: Tensor, base: Tensor) -> Tensor:
        kernels = base + given.repeat_interleave(self.group_size, dim=-1)  # [B, Q, k, H]
        out = x * kernels[:, :, 0]
        for tap in range(1, self.taps):
            out = out + F.pad(x[:, :-tap], (0, 0, tap, 0)) * kernels[:, :, tap]
        return out


class PairSelector(nn.Module):
    """DFlash2's: <P h * phi(a), psi(b)> for token b after token a, h being the hidden state that drafts b."""

    def __init__(self, hidden_size: int, vocab_size: int, scored: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(scored, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, hidden: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """Scores [B, d, J, K] to be added to logits.

        Args:
            hidden: [B, d, H].
            previous: [B, d, J] token ids in front.
            candidates: [B, d, K] columns of the draft vocabulary.
        """
        context = self.hidden_projection(hidden)[:, :, None] * self.predecessor_codebook[previous]
        return context @ self.successor_codebook[candidates].transpose(-1, -2)


class MarkovSelector(nn.Module):
    """DSpark's: <phi(a), psi(b)>, phi(a) gated by the hidden state that drafts b or not."""

    def __init__(self, hidden_size: int, vocab_size: int, scored: int, rank: int, gated: bool) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, scored, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if gated else None

    def forward(self, hidden: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """Scores [B, d, J, K]; shapes as for `PairSelector`."""
        phi = self.markov_w1(previous)
        if self.gate_proj is not None:
            wide = hidden[:, :, None].expand(-1, -1, phi.shape[2], -1)
            phi = phi * torch.sigmoid(self.gate_proj(torch.cat([wide, phi], dim=-1)))
        return phi @ self.markov_w2.weight[candidates].transpose(-1, -2)
