"""`Candidates`: the tokens that the draft trees of one round may grow from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_dart.trees.arrays import Values
from hf_dart.trees.scores import Formula


@dataclass(frozen=True)
class Candidates:
    """Candidate tokens of B rows for each of d depths, and copies of earlier text; NumPy arrays, or tensors.

    Attributes:
        history: [B, C] last committed tokens, the root of the tree last; as many as `formula` looks at, 1 at least.
        tokens: [B, d, K] candidates for each depth; -1 is no candidate.
        steps: [B, d, J, K] the drafter's log-probability of candidate k after candidate j of the depth before; J is 1
            where it does not depend on that.
        formula: how these become scores.
        copied: [B, L] tokens that followed the same text earlier, -1 after the last one (`trees.copies`); where they
            lie within d, they are among the candidates.
        chances: [B, L] log-probability of each copied token after the one before; -inf after the last one.
        deepest: [B] no node of a row lies deeper; None for no limit.
        ending: [B, d, K] candidates that end the text, after which nothing grows; None for none.
    """

    history: Values
    tokens: Values
    steps: Values
    formula: Formula
    copied: Values
    chances: Values
    deepest: Sequence[int] | Tensor | None = None
    ending: Values | None = None

    def on_host(self) -> Candidates:
        """Convert to NumPy arrays, with scores in float64; tensors have to lie on the CPU."""
        deepest: Any = self.deepest.tolist() if isinstance(self.deepest, Tensor) else self.deepest
        return Candidates(
            self.history.numpy(),
            self.tokens.numpy(),
            self.steps.detach().double().numpy(),
            self.formula,
            self.copied.numpy(),
            self.chances.double().numpy(),
            deepest,
            None if self.ending is None else self.ending.numpy(),
        )

    def on(self, device: torch.device) -> Candidates:
        """Convert to tensors on a device, with scores in float32."""
        deepest = self.deepest
        if deepest is not None and not isinstance(deepest, Tensor):
            limited = min(deepest) < max(self.tokens.shape[1], self.copied.shape[1])
            deepest = torch.tensor(deepest, device=device) if limited else None
        return Candidates(
            self.history.to(device),
            self.tokens.to(device),
            self.steps.float().to(device),
            self.formula,
            self.copied.to(device),
            self.chances.float().to(device),
            deepest,
            None if self.ending is None else self.ending.to(device),
        )
