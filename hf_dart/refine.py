"""Refiners of draft scores: parallel logits know each position, not each other.

`BigramSelector` scores every pair of neighbouring candidates, so that a tree prefers tokens that go together
(the bigram term of UBTree, arXiv 2609.39972; the selector of DFlash 2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_dart.configuration import DartConfig


class BigramSelector(nn.Module):
    """delta_i(a, b) = scale_i * <P h_i * phi(a), psi(b)> for candidate b behind candidate a at depth i.

    phi and psi read the target's frozen token embeddings, so that nothing grows with the vocabulary. With P
    at zero, as it starts, delta is zero and the scores are the head's own.
    """

    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        rank = config.selector_rank
        self.context = nn.Linear(config.hidden_size, rank, bias=False)
        self.previous = _projection(config.embedding_size, rank)
        self.candidate = _projection(config.embedding_size, rank)
        self.log_scale = nn.Embedding(config.draft_length, 1)
        self._tables: tuple[Any, Tensor, Tensor] | None = None

    def forward(self, hidden: Tensor, embeddings: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """delta of all pairs.

        Args:
            hidden: [..., d, H] what the draft logits were read from.
            embeddings: [n, E] of n different tokens.
            previous: [..., d, J] which of them are in front.
            candidates: [..., d, K] which of them are the candidates at each depth.

        Returns:
            [..., d, J, K]
        """
        return self._pairs(hidden, self.previous(embeddings)[previous], self.candidate(embeddings)[candidates])

    def lookup(self, hidden: Tensor, embeddings: nn.Embedding, previous: Tensor, candidates: Tensor) -> Tensor:
        """As `forward`, with token ids of the whole vocabulary.

        The projections of all tokens are made on first use, and again when the weights have changed.
        """
        phi, psi = self._vocabulary_tables(embeddings)
        return self._pairs(hidden, phi[previous], psi[candidates])

    def _pairs(self, hidden: Tensor, phi: Tensor, psi: Tensor) -> Tensor:
        scale = self.log_scale.weight[: hidden.shape[-2]].exp()  # [d, 1]
        context = (self.context(hidden) * scale)[..., None, :]  # [..., d, 1, r]
        return (context * phi) @ psi.transpose(-1, -2)

    @torch.no_grad()
    def _vocabulary_tables(self, embeddings: nn.Embedding) -> tuple[Tensor, Tensor]:
        weights = [self.previous[0].weight, self.previous[2].weight, self.candidate[0].weight, self.candidate[2].weight]
        key = [(id(weight), weight._version, weight.device) for weight in (*weights, embeddings.weight)]
        if self._tables is None or self._tables[0] != key:
            device, dtype = self.context.weight.device, self.context.weight.dtype
            parts = []
            ids = torch.arange(embeddings.num_embeddings, device=embeddings.weight.device)
            for chunk in ids.split(8192):
                vectors = embeddings(chunk).to(device=device, dtype=dtype)
                parts.append((self.previous(vectors), self.candidate(vectors)))
            self._tables = (key, torch.cat([phi for phi, _ in parts]), torch.cat([psi for _, psi in parts]))
        return self._tables[1], self._tables[2]


def _projection(width: int, rank: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * rank, bias=False), nn.SiLU(), nn.Linear(4 * rank, rank, bias=False))
