"""A selector for the candidates of a draft: parallel logits know each position, not each other.

`BigramSelector` scores every pair of neighbouring candidates, so that a tree prefers tokens that go together
(the bigram term of UBTree, arXiv 2609.39972; the selector of DFlash 2), or, as a Markov head does (DSpark, arXiv
2607.05147), by one low-rank matrix whatever the context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_dart.drafters.dart.configuration import DartConfig
from hf_dart.drafters.vocabulary import state_of
from hf_dart.models.devices import device_of


class BigramSelector(nn.Module):
    """s_i(a, b) = weight_i * u_i(b) + scale_i * <P h_i * phi(a), psi(b)> for candidate b after candidate a at depth i.

    u is the head's own logit. phi and psi read the target's frozen token embeddings, so that nothing grows with the
    vocabulary. A Markov head has no P: its second part is scale_i * <phi(a), psi(b)>. With P, or psi, at zero and all
    weights 1, as it starts, the scores are the head's own. What is computed is delta = s - u: u may be seen through
    processors, and with the noise of sampling, before delta is added.
    """

    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        rank = config.selector_rank
        self.context = nn.Linear(config.hidden_size, rank, bias=False) if config.selector_kind == "bigram" else None
        self.previous = _projection(config.embedding_size, rank)
        self.candidate = _projection(config.embedding_size, rank)
        self.log_scale = nn.Embedding(config.draft_length, 1)
        self.log_weight = nn.Embedding(config.draft_length, 1)
        self._tables: tuple[Any, Tensor, Tensor] | None = None

    def start_neutral(self) -> None:
        """Let delta be zero, and every scale and weight 1."""
        nn.init.zeros_(self.candidate.get_parameter("2.weight") if self.context is None else self.context.weight)
        nn.init.zeros_(self.log_scale.weight)
        nn.init.zeros_(self.log_weight.weight)

    def forward(
        self, hidden: Tensor, logits: Tensor, embeddings: Tensor, previous: Tensor, candidates: Tensor
    ) -> Tensor:
        """`delta` of all pairs.

        Args:
            hidden: [..., d, H] what the draft logits were read from.
            logits: [..., d, K] u of the candidates.
            embeddings: [n, E] of n different tokens.
            previous: [..., d, J] which of them are in front.
            candidates: [..., d, K] which of them are the candidates at each depth.

        Returns:
            [..., d, J, K]
        """
        return self._delta(hidden, logits, self.previous(embeddings)[previous], self.candidate(embeddings)[candidates])

    def lookup(
        self, hidden: Tensor, logits: Tensor, embeddings: nn.Embedding, previous: Tensor, candidates: Tensor
    ) -> Tensor:
        """Score pairs of candidates given as token ids of the whole vocabulary; shapes as in `forward`.

        The projections of all tokens are made on first use, and again when the weights have changed.
        """
        # When traced, the tables are up to date: `engine` makes them before, and again when weights change.
        known = self._tables if torch.compiler.is_compiling() else None
        phi, psi = self._vocabulary_tables(embeddings) if known is None else known[1:]
        return self._delta(hidden, logits, phi[previous], psi[candidates])

    def _delta(self, hidden: Tensor, logits: Tensor, phi: Tensor, psi: Tensor) -> Tensor:
        depth = hidden.shape[-2]
        scale, weight = self.log_scale.weight[:depth].exp(), self.log_weight.weight[:depth].exp()  # [d, 1]
        context = scale if self.context is None else self.context(hidden) * scale
        context = context[..., None, :]  # [..., d, 1, r], or [d, 1, 1]
        return (context * phi) @ psi.transpose(-1, -2) + ((weight - 1) * logits)[..., None, :]

    @torch.no_grad()
    def _vocabulary_tables(self, embeddings: nn.Embedding) -> tuple[Tensor, Tensor]:
        weights = [self.previous[0].weight, self.previous[2].weight, self.candidate[0].weight, self.candidate[2].weight]
        key = [state_of(weight) for weight in (*weights, embeddings.weight)]
        if self._tables is None or self._tables[0] != key:
            device, dtype = weights[0].device, weights[0].dtype
            parts = []
            ids = torch.arange(embeddings.num_embeddings, device=device_of(embeddings))
            for chunk in ids.split(8192):
                vectors = embeddings(chunk).to(device=device, dtype=dtype)
                parts.append((self.previous(vectors), self.candidate(vectors)))
            self._tables = (key, torch.cat([phi for phi, _ in parts]), torch.cat([psi for _, psi in parts]))
        return self._tables[1], self._tables[2]


def _projection(width: int, rank: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * rank, bias=False), nn.SiLU(), nn.Linear(4 * rank, rank, bias=False))
