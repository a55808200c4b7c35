"""Chains: one draft per row, a token for each depth, and what candidates score after its tokens."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor


def after_draft(draft: Tensor, scores: Tensor, candidates: Tensor, steps: Tensor) -> Tensor:
    """Put scores of candidates after a draft's own tokens [B, d] in the place of others: [B, d, W, W].

    They are `scores` [B, d, K] of the first K of the candidates [B, d, W], those that are not copied; the others are
    `steps` [B, d, W or 1, W], scores after each candidate of the depth before, or after any.
    """
    more = candidates.shape[-1] - scores.shape[-1]
    scores = torch.nn.functional.pad(scores, (0, more), value=-inf)
    drafted = torch.zeros_like(candidates, dtype=torch.bool)  # True if the candidate before is the draft's
    drafted[:, 1:] = candidates[:, :-1] == draft[:, :-1, None]
    return torch.where(drafted[..., None], scores[:, :, None], steps)


def best_chain(candidates: Tensor, steps: Tensor) -> Tensor:
    """Return the tokens [B, d], of candidates [B, d, K], of the path that takes the best step at every depth.

    `steps` [B, d, J, K] are scores of candidate k after candidate j of the depth before; J is 1 where j does not count.
    """
    columns = steps[:, 0, 0].argmax(-1)  # [B]
    path = [columns]
    for after in steps[:, 1:].unbind(1):
        row = columns if after.shape[1] > 1 else torch.zeros_like(columns)
        columns = after.gather(1, row[:, None, None].expand(-1, 1, after.shape[-1]))[:, 0].argmax(-1)
        path.append(columns)
    return candidates.gather(2, torch.stack(path, dim=1)[..., None])[..., 0]
