"""Draft logits by a low-rank LM head: the widest matrix that a draft reads, made narrower.

The target's LM head W [V, H] scores a draft's tokens; in a head of one layer, reading it is most of a draft. Here W is
taken apart once, W ≈ U P with U [V, r] and P [r, H], the best of that rank (a truncated singular value
decomposition), and r (V + H) numbers are read instead of V H. SlimSpec (arXiv 2605.10453) trains such a head; this
one is made of any weights and needs no training. What the low rank gets wrong among the best tokens is fixed: the
`EXACT` best of them are scored once more by their own rows of W.

Only drafts are scored so, and what is verified is the target's own: the output stays the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dart.drafters.vocabulary import state_of

EXACT = 64
"""Tokens per drafted position that are scored exactly."""


class Factors(NamedTuple):
    """An LM head in parts.

    Attributes:
        up, down: U [V, r] and P [r, H].
        weight: W [V, H], the rows of a draft vocabulary where there is one.
        bias: [V], or None.
    """

    up: Tensor
    down: Tensor
    weight: Tensor
    bias: Tensor | None

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor, bias: Tensor | None, rank: int) -> Factors:
        """The best factors of that rank."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        gram = torch.zeros(weight.shape[1], weight.shape[1], dtype=wide, device=weight.device)
        for rows in weight.split(16384):  # a copy of W in fp32 might be too large
            gram.addmm_(rows.T.to(wide), rows.to(wide))
        # The right singular vectors of W are the eigenvectors of W'W, the largest values last.
        down = torch.linalg.eigh(gram).eigenvectors[:, -rank:].T.to(weight.dtype).contiguous()
        return cls(F.linear(weight, down), down, weight, bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, d, H] to logits [B, d, V]."""
        scores = F.linear(F.linear(hidden, self.down), self.up, self.bias)
        best = scores.topk(min(EXACT, scores.shape[-1])).indices
        exact = (self.weight[best] @ hidden[..., None])[..., 0]
        if self.bias is not None:
            exact = exact + self.bias[best]
        return scores.scatter(-1, best, exact)


class LowRankHead:
    """The factors of an LM head, made once for its weights as they are."""

    def __init__(self) -> None:
        self._made: tuple[Any, Tensor | None, Factors] | None = None

    def __call__(self, lm_head: nn.Module, hidden: Tensor, vocabulary: Tensor | None, rank: int) -> Tensor:
        """Hidden states [B, d, H], in the LM head's dtype, to logits [B, d, V], or [B, d, M] of a draft vocabulary."""
        if self._made is not None and torch.compiler.is_compiling():  # as in `LMHeadRows`
            return self._made[2].logits(hidden)
        weight: Any = lm_head.weight
        key = (state_of(weight), rank)
        if self._made is None or self._made[0] != key or self._made[1] is not vocabulary:
            with torch.inference_mode(False):
                bias: Any = lm_head.bias
                rows, bias = weight.detach(), None if bias is None else bias.detach()
                if vocabulary is not None:
                    places = vocabulary.to(rows.device)
                    rows, bias = rows[places], None if bias is None else bias[places]
                self._made = (key, vocabulary, Factors.of(rows, bias, rank))
        return self._made[2].logits(hidden)
