"""`NgramTable.probabilities` of many n-grams at once: in NumPy, compiled by numba if it is installed, and in torch.

All give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from hf_dart.ngram.table import Array, NgramTable


class HostNgrams:
    """The arrays of a table as they lie in its file.

    Args:
        table: the table.
        machine_code: use numba, if it is installed.
    """

    def __init__(self, table: NgramTable, machine_code: bool = True) -> None:
        self._table, self._compiled = table, compiled() if machine_code else None

    def probabilities(self, contexts: Array, candidates: Array) -> Array:
        """As `NgramTable.probabilities`, of contexts [..., C] and candidates [..., K] that broadcast; [..., K]."""
        contexts, candidates = self.known(contexts), self.known(candidates)
        return self.behind(contexts, candidates, self.alone(candidates))

    def known(self, tokens: Array) -> Array:
        """The same ids, with -1 in place of those that the table does not know."""
        return np.where((tokens >= 0) & (tokens < self._table.spec.vocab_size), tokens, -1)

    def alone(self, candidates: Array) -> Array:
        """The share of each of the `known` candidates [..., K] in all tokens."""
        table = self._table
        return np.where(candidates >= 0, table.unigrams[candidates] / max(table.tokens, 1), 0.0)

    def behind(self, contexts: Array, candidates: Array, shorter: Array, shortest: int = 1) -> Array:
        """Probabilities [..., K] of candidates, of which what shorter contexts say is known.

        Args:
            contexts: [..., C] tokens in front, of those `known`.
            candidates: [..., K] token ids, likewise. Neighbours in memory are quickest found, so they best ascend.
            shorter: [..., K] what contexts of less than `shortest` tokens say.
            shortest: 1 or more.
        """
        longer = contexts.shape[-1] >= shortest
        if self._compiled is None and longer:
            return self._back_off(shorter, contexts, candidates, shortest)
        shape, width = np.broadcast_shapes(contexts.shape[:-1], candidates.shape[:-1]), candidates.shape[-1]
        if self._compiled is None or not longer:
            return np.broadcast_to(shorter, (*shape, width))
        found = np.broadcast_to(shorter, (*shape, width)).reshape(-1, width).copy()
        rows = np.broadcast_to(contexts, (*shape, contexts.shape[-1])).reshape(-1, contexts.shape[-1])
        wanted = np.broadcast_to(candidates, (*shape, width)).reshape(-1, width)
        arrays = (self._table.unigrams, tuple(self._table.keys), tuple(self._table.counts))
        self._compiled(found, rows, wanted, shortest, self._table.spec.bits, *arrays)
        return found.reshape(*shape, width)

    def _back_off(self, found: Array, contexts: Array, candidates: Array, shortest: int) -> Array:
        """What contexts of `shortest` tokens and more say, in place of what was `found` [..., K]."""
        bits, width = self._table.spec.bits, contexts.shape[-1]
        # Where a token is unknown, keys are negative, and in no table.
        packed = np.zeros(contexts.shape[:-1], dtype=np.int64)
        for length in range(1, min(self._table.spec.order - 1, width) + 1):
            packed = packed | (contexts[..., -length] << ((length - 1) * bits))
            if length < shortest:
                continue
            totals = self._totals(length, packed)
            packed = np.where(totals > 0, packed, -1)
            counts, there = self._counted(length + 1, (packed << bits)[..., None] | candidates)
            share = np.minimum(counts / np.maximum(totals, 1.0)[..., None], 1.0)
            found = np.where(there, share, found)
        return found

    def _totals(self, order: int, keys: Array) -> Array:
        """How often n-grams occur."""
        if order == 1:
            return np.where(keys >= 0, self._table.unigrams[keys], 0)
        counts, there = self._counted(order, keys)
        return counts * there

    def _counted(self, order: int, wanted: Array) -> tuple[Array, Array]:
        """Counts [...] of n-grams of one order, 2 or more, and whether they are there; else a count means nothing."""
        keys, counts = self._table.keys[order - 2], self._table.counts[order - 2]
        if not len(keys):
            return np.zeros(wanted.shape, dtype=np.uint32), np.zeros(wanted.shape, dtype=bool)
        places = keys.searchsorted(wanted)
        return counts.take(places, mode="clip"), keys.take(places, mode="clip") == wanted


class DeviceNgrams:
    """The arrays of a table, copied to a device: 12 bytes of its memory per n-gram.

    Args:
        table: the table.
        device: where.
    """

    def __init__(self, table: NgramTable, device: torch.device) -> None:
        self.spec, self._tokens = table.spec, max(table.tokens, 1)
        with safe_open(table.path, framework="pt", device=str(device)) as file:
            orders = range(2, table.spec.order + 1)
            self._unigrams = file.get_tensor("counts.1")
            self._keys = [file.get_tensor(f"keys.{order}") for order in orders]
            # Few operations take uint32.
            self._counts = [file.get_tensor(f"counts.{order}").view(torch.int32) for order in orders]
        self._float = torch.float32 if device.type == "mps" else torch.float64

    def probabilities(self, contexts: Tensor, candidates: Tensor) -> Tensor:
        """As `NgramTable.probabilities`, without waiting for the device.

        Args:
            contexts: [..., C] the tokens in front, the last one last; a negative one ends the context.
            candidates: [..., K] token ids, which may broadcast; negative is no candidate.

        Returns:
            [..., K] float64.
        """
        spec = self.spec
        real = (candidates >= 0) & (candidates < spec.vocab_size)
        tokens = torch.where(real, candidates, 0)
        found = torch.where(real, self._unigrams[tokens].to(self._float) / self._tokens, 0.0)
        found = found.expand(*contexts.shape[:-1], -1)
        packed = torch.zeros_like(contexts[..., 0]) if contexts.shape[-1] else None
        usable: Any = True
        for length in range(1, min(spec.order - 1, contexts.shape[-1]) + 1):
            assert packed is not None
            token = contexts[..., -length]
            usable = usable & (token >= 0) & (token < spec.vocab_size)
            packed = packed | (torch.where(usable, token, 0) << ((length - 1) * spec.bits))
            totals = self._unigrams[packed] if length == 1 else self._counted(length, packed)
            usable = usable & (totals > 0)
            counts = self._counted(length + 1, (packed << spec.bits)[..., None] | tokens)
            share = counts.to(self._float) / totals.clamp(min=1)[..., None]
            found = torch.where((counts > 0) & usable[..., None] & real, share.clamp(max=1.0), found)
        return found

    def _counted(self, order: int, keys: Tensor) -> Tensor:
        """Counts [...] of n-grams of one order (2 or more), as int64."""
        known, counts = self._keys[order - 2], self._counts[order - 2]
        if not len(known):
            return torch.zeros_like(keys)
        places = torch.searchsorted(known, keys.contiguous()).clamp(max=len(known) - 1)
        return torch.where(known[places] == keys, counts[places].long() & 0xFFFFFFFF, 0)


@cache
def compiled() -> Callable[..., None] | None:
    """`HostNgrams._back_off` as machine code, made on first use; None without numba (`pip install 'hf-dart[fast]'`)."""
    try:
        import numba
    except ImportError:
        return None

    @numba.njit(cache=True)
    def place_of(keys, low, high, wanted):  # type: ignore[no-untyped-def]
        while low < high:
            middle = (low + high) >> 1
            if keys[middle] < wanted:
                low = middle + 1
            else:
                high = middle
        return low

    @numba.njit(cache=True)
    def behind(found, context, tokens, shortest, bits, unigrams, keys, counts):  # type: ignore[no-untyped-def]
        packed = 0
        for length in range(1, min(len(keys), len(context)) + 1):
            token = context[len(context) - length]
            if token < 0:
                return
            packed |= token << ((length - 1) * bits)
            if length < shortest:
                continue
            total = 0
            if length == 1:
                total = unigrams[packed]
            else:
                place = place_of(keys[length - 2], 0, len(keys[length - 2]), packed)
                if place < len(keys[length - 2]) and keys[length - 2][place] == packed:
                    total = counts[length - 2][place]
            if total == 0:
                return
            known, often = keys[length - 1], counts[length - 1]
            first = place_of(known, 0, len(known), packed << bits)
            last = place_of(known, first, len(known), (packed << bits) | ((1 << bits) - 1))
            last = min(last + 1, len(known))
            for candidate in range(len(tokens)):
                if tokens[candidate] >= 0:
                    wanted = (packed << bits) | tokens[candidate]
                    place = place_of(known, first, last, wanted)
                    if place < last and known[place] == wanted:
                        found[candidate] = min(often[place] / total, 1.0)

    @numba.njit(cache=True)
    def back_off(found, contexts, tokens, shortest, bits, unigrams, keys, counts):  # type: ignore[no-untyped-def]
        for row in range(len(contexts)):
            behind(found[row], contexts[row], tokens[row], shortest, bits, unigrams, keys, counts)

    return back_off
