"""Functions of NumPy arrays and tensors alike, so that one formula serves trees grown in either."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

Values = Any
"""A NumPy array or a tensor; all of one call are of one kind."""


def namespace(values: Values) -> ModuleType:
    """`torch` for a tensor, `numpy` for an array: the module whose functions take it."""
    return torch if isinstance(values, Tensor) else np


def take(values: Values, places: Values) -> Values:
    """Take `values` [B, n, ...] at `places` [B, m] of each row: [B, m, ...]."""
    if isinstance(values, Tensor):
        wide = places.view(*places.shape, *(1,) * (values.ndim - 2))
        return values.gather(1, wide.expand(*places.shape, *values.shape[2:]))
    if len(values) == 1:  # takes half the time
        return values[0].take(places, axis=0)
    return values[np.arange(len(values))[:, None], places]


def log_sum(values: Values) -> Values:
    """Log Σ exp over the last dimension, which stays with size 1."""
    if isinstance(values, Tensor):
        return values.logsumexp(-1, keepdim=True)
    return np.logaddexp.reduce(values, axis=-1, keepdims=True)
