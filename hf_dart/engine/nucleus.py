"""Top-p without a sort: the nucleus is bounded by one score, which is searched for."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = 32  # of a float32 score: as many halvings find any of them
_NOTHING = -0x7F800002  # the number in front of that of -inf
_POSITIVE = 0x7FFFFFFF


def outside_nucleus(scores: Tensor, top_p: float, least: int = 1) -> Tensor:
    """Which tokens [R, V] stock's `TopPLogitsWarper` takes out.

    Those are the unlikeliest ones, as many as have no more than 1 - `top_p` of the probability together; among equal
    scores those that stand first, as in a stable sort. A sort of whole vocabularies takes several times as long on a
    GPU as 32 sums over them, by which the largest score is found at and below which all are taken out.

    Sums are of float64. Stock's own, of float32 in the order of the sort, are uncertain by their rounding, some 1e-7:
    so it may differ by a token at which the sum is as close to 1 - `top_p`, as stock does from device to device.

    Args:
        scores: [R, V] float32.
        top_p: of the warper.
        least: tokens that stay whatever they are, the likeliest ones.
    """
    chances, allowed = scores.softmax(-1), 1 - top_p  # compared as stock does, in float32
    most = scores.shape[-1] - least
    # All at and below `low` may go, not all at and below `high`.
    low, high = torch.full_like(scores[:, :1], _NOTHING, dtype=torch.long), _number(scores.amax(-1, keepdim=True))
    for _ in range(_BITS):
        middle = (low + high) // 2
        goes = scores <= _score(middle)
        may_go = (_sum(chances, goes).float() <= allowed) & (goes.sum(-1, keepdim=True) <= most)
        low, high = torch.where(may_go, middle, low), torch.where(may_go, high, middle)
    goes = scores <= _score(low)
    # Of the tokens with the next score some may go as well.
    next_score = scores.masked_fill(goes, torch.inf).amin(-1, keepdim=True)
    equal = scores == next_score
    rank = equal.cumsum(-1)
    chance = chances.masked_fill(~equal, 0).amax(-1, keepdim=True).double()
    mass, count = _sum(chances, goes) + rank * chance, goes.sum(-1, keepdim=True) + rank
    return goes | (equal & (mass.float() <= allowed) & (count <= most))


def _sum(chances: Tensor, of: Tensor) -> Tensor:
    return chances.masked_fill(~of, 0).sum(-1, keepdim=True, dtype=torch.float64)


def _number(scores: Tensor) -> Tensor:
    """Whole numbers in the order of float32 scores."""
    bits = scores.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & _POSITIVE) - 1, bits)


def _score(numbers: Tensor) -> Tensor:
    """The scores of such numbers; in front of that of -inf there is NaN, which no score is at or below."""
    bits = torch.where(numbers < 0, (-1 - numbers) - _POSITIVE - 1, numbers)
    return bits.int().view(torch.float32)
