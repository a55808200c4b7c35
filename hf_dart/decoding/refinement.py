"""The draft that a drafter looks at again, and what the second look says about its tree.

Nothing here can change the output: a refined draft is verified like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor


@dataclass(frozen=True)
class Refined:
    """Scores behind the tokens of one draft per row; behind any other token the first draft's still stand.

    Attributes:
        tokens: [B, d] that draft.
        scores: [B, d, K] log-scores of the candidates, each behind the draft's tokens in front of it.
    """

    tokens: Tensor
    scores: Tensor

    def replace(self, candidates: Tensor, table: Tensor) -> Tensor:
        """Transitions, of which those from the draft's own tokens are the refined ones.

        Args:
            candidates: [B, D, W] the candidates that were scored, and perhaps more behind them: copied tokens.
            table: [B, D, W, W] transitions, or a view that broadcasts to them.

        Returns:
            [B, D, W, W]
        """
        depth, width = self.scores.shape[1:]
        scores = self.scores.new_full(candidates.shape, -inf)
        scores[:, :depth, :width] = self.scores
        drafted = torch.zeros_like(candidates, dtype=torch.bool)  # the candidate in front is the draft's
        drafted[:, 1:depth] = candidates[:, : depth - 1] == self.tokens[:, : depth - 1, None]
        return torch.where(drafted[..., None], scores[:, :, None], table)


def best_chain(candidates: Tensor, table: Tensor | None) -> Tensor:
    """The tokens [B, d] of the path that takes the best step at every depth.

    Args:
        candidates: [B, d, K] token ids, best first.
        table: [B, d, K, K] transitions; None where they do not depend on the token in front.
    """
    if table is None:
        return candidates[..., 0]
    columns = [table[:, 0, 0].argmax(-1)]  # [B] each
    for steps in table[:, 1:].unbind(1):
        row = columns[-1][:, None, None].expand(-1, 1, steps.shape[-1])
        columns.append(steps.gather(1, row)[:, 0].argmax(-1))
    return candidates.gather(2, torch.stack(columns, dim=1)[..., None])[..., 0]
