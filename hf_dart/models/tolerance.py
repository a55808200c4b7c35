"""The one rule for what rounding may do to a result, used by every comparison of two ways to compute it."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

# Number of roundings by which sums in another order may differ, and the least relative difference that is allowed:
# some families compute parts in float32 whatever their dtype.
_ROUNDINGS, _LEAST = 16, 2.0**-15
# Factor by which a difference may exceed one that is known to be rounding.
_NOISE = 8


def narrow_dtype(numbers: Tensor) -> torch.dtype | None:
    """Return the dtype of 16 bits that all `numbers` fit into, whatever dtype they are kept in; None if there is none.

    Autocast multiplies in 16 bits, and accelerate's hands its results on in float32.
    """
    narrow = (torch.bfloat16, torch.float16)
    return next((dtype for dtype in narrow if torch.equal(numbers.to(dtype).to(numbers), numbers)), None)


def coarsest(*found: Tensor | torch.dtype) -> torch.dtype:
    """Return the dtype that rounds most coarsely among some, and those that tensors show (`narrow_dtype`)."""
    dtypes = [narrow_dtype(one) or one.dtype if isinstance(one, Tensor) else one for one in found]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def allowance(dtype: torch.dtype, noise: float = 0.0) -> float:
    """Return the difference, as a share of the largest number, up to which two results in a dtype are the same.

    `noise` is a `difference` of two results that are known to be the same.
    """
    return max(_ROUNDINGS * torch.finfo(dtype).eps, _LEAST) + _NOISE * noise


def difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two results of one shape, as a share of the largest number in `other`."""
    # Apple GPUs have no float64; numbers of fewer bits are told apart in float32.
    one, other = (part.cpu() if part.dtype == torch.float64 else part.cpu().float() for part in (one, other))
    apart, largest = (torch.linalg.vector_norm(part, inf) for part in (one - other, other))
    return float(apart / largest.clamp(min=torch.finfo(other.dtype).tiny))


def same(one: Tensor, other: Tensor) -> bool:
    """Return True if two results differ by no more than the rounding that `one` shows; NaN is never the same."""
    return one.shape == other.shape and difference(one, other) <= allowance(coarsest(one))
