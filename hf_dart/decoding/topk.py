"""The best K of a whole vocabulary in two steps, with ties in a known order."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

_WIDTH = 256  # of a chunk


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of `scores` [..., V], and where they are: both [..., k], the largest first.

    Equal scores stand in the order of their places, as a stable sort would leave them; `torch.topk` has them in any.

    One pass reads all scores for the maxima of chunks; only the k chunks of the largest maxima are sorted. They hold
    the k best: whatever stands in another chunk has k maxima before it.
    """
    size = scores.shape[-1]
    chunks = -(-size // _WIDTH)
    if chunks <= 2 * k:
        return _first(scores, k)
    padded = torch.nn.functional.pad(scores, (0, chunks * _WIDTH - size), value=-inf).unflatten(-1, (chunks, _WIDTH))
    chosen = _first(padded.amax(-1), k)[1].sort(-1).values  # ascending, so that places stay in order
    kept = padded.gather(-2, chosen[..., None].expand(*chosen.shape, _WIDTH)).flatten(-2)
    best, places = _first(kept, k)
    return best, chosen.gather(-1, places // _WIDTH) * _WIDTH + places % _WIDTH


def ranked(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `largest`, by what is quickest on the device: on a CPU `torch.topk` is, which has equal scores in any order.

    Of 8 x 152,000 scores, one thread takes 1.5 ms for it, and 3.1 ms for `largest`. On a GPU, `torch.topk` makes
    several passes over all scores.
    """
    return largest(scores, k) if scores.is_cuda else scores.topk(k)


def _first(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best, places = scores.sort(dim=-1, descending=True, stable=True)
    return best[..., :k], places[..., :k]
