"""Probabilities of many n-grams at once, from counts on the host or on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

Values = Any
"""A NumPy array or a tensor; all of one call are of one kind."""


class Ngrams:
    """`NgramTable.probabilities` for arrays of n-grams: the same code looks them up in NumPy arrays and in tensors.

    Each order is looked up once for all contexts and candidates, so that a depth of a tree costs a few operations, and
    on a device nothing is read back.

    Args:
        bits: of one token in a key.
        unigrams: [V] int64 counts of single tokens.
        keys: per order from 2 on, sorted int64 keys of n-grams.
        counts: per order from 2 on, their counts: uint32 in arrays, the same bits as int32 in tensors.
    """

    def __init__(self, bits: int, unigrams: Values, keys: Sequence[Values], counts: Sequence[Values]) -> None:
        self._bits, self._keys, self._counts = bits, keys, counts
        # Apple GPUs have no float64.
        self._functions: Any = torch if isinstance(unigrams, Tensor) else np
        self._float = self._functions.float64
        if isinstance(unigrams, Tensor) and unigrams.device.type == "mps":
            self._float = torch.float32
        self._unigrams = _as(unigrams, self._float)

    def probabilities(self, contexts: Values, candidates: Values) -> Values:
        """Probability of each candidate after each context, by the rule of `NgramTable.probabilities`.

        Args:
            contexts: [..., C] the tokens before, the last one last; one that is no token ends the context.
            candidates: [..., K] token ids, which may broadcast; what is no token has probability 0.

        Returns:
            [..., K] float64.
        """
        return self.after(self.known(contexts), self.known(candidates))

    def known(self, tokens: Values) -> Values:
        """Replace ids that are no tokens of the table by -1."""
        return self._functions.where((tokens >= 0) & (tokens < len(self._unigrams)), tokens, -1)

    def after(self, contexts: Values, candidates: Values) -> Values:
        """Probabilities [..., K] of candidates after contexts.

        Args:
            contexts: [..., C] tokens before, of those `known`.
            candidates: [..., K] likewise; may broadcast.
        """
        xp, width = self._functions, candidates.shape[-1]
        found = _as(xp.zeros_like(candidates), self._float)
        longest = min(contexts.shape[-1], len(self._keys))
        if longest == 0:
            return xp.broadcast_to(found, (*contexts.shape[:-1], width))
        # A key is negative, and in no table, where one of its tokens or its context is unknown.
        packed = contexts[..., -1]
        totals = xp.where(packed >= 0, self._unigrams[packed], 0.0)
        for length in range(1, longest + 1):
            keys = (packed << self._bits)[..., None] | candidates
            if length < longest:
                # The next longer context is an n-gram of this order, too.
                packed = (contexts[..., -length - 1] << (length * self._bits)) | packed
                keys = xp.concatenate([keys, packed[..., None]], -1)
            counts = self._counted(length + 1, keys)
            totals, shares = counts[..., -1], counts[..., :width] / totals.clip(min=1.0)[..., None]
            found = xp.where(shares > 0, shares, found)
        return found.clip(max=1.0)

    def _counted(self, order: int, keys: Values) -> Values:
        """Return counts [...] of n-grams of one order, 2 or more, as floats; 0 for those that the table lacks."""
        xp, known, counts = self._functions, self._keys[order - 2], self._counts[order - 2]
        if not len(known):
            return _as(xp.zeros_like(keys), self._float)
        if isinstance(keys, Tensor):
            places = torch.searchsorted(known, keys.contiguous()).clamp(max=len(known) - 1)
            often = counts[places].long() & 0xFFFFFFFF
        else:
            places = np.minimum(known.searchsorted(keys), len(known) - 1)
            often = counts[places]
        return _as(xp.where(known[places] == keys, often, 0), self._float)


def _as(values: Values, kind: Any) -> Values:
    """Values of another type of number."""
    return values.to(kind) if isinstance(values, Tensor) else values.astype(kind)
