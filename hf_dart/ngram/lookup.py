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
        shape = np.broadcast_shapes(contexts.shape[:-1], candidates.shape[:-1])
        contexts, candidates = self.known(contexts), self.known(candidates)
        with np.errstate(divide="ignore", invalid="ignore"):
            rows = np.broadcast_to(contexts, (*shape, contexts.shape[-1]))
            found = self.behind(rows, candidates, self.alone(candidates))
        return np.broadcast_to(found, (*shape, candidates.shape[-1]))

    def known(self, tokens: Array) -> Array:
        """The same int64 ids, with -1 in place of those that the table does not know."""
        # As unsigned numbers, negative ones are large.
        return np.where(tokens.view(np.uint64) < self._table.spec.vocab_size, tokens, -1)

    def alone(self, candidates: Array) -> Array:
        """The share of each of the `known` candidates [..., K] in all tokens."""
        table = self._table
        return np.where(candidates >= 0, table.unigrams[candidates] / max(table.tokens, 1), 0.0)

    def behind(self, contexts: Array, candidates: Array, alone: Array) -> Array:
        """Probabilities [..., K] of candidates behind contexts.

        NumPy may warn of divisions by zero, of which nothing is left.

        Args:
            contexts: [..., C] tokens in front, of those `known`; with C = 0, `alone` comes back as it is.
            candidates: [..., K] token ids, likewise, that broadcast. Neighbours in memory are quickest found, so they
                best ascend.
            alone: [..., K] what is said of them without a context.
        """
        length = min(contexts.shape[-1], self._table.spec.order - 1)
        if not length or not len(self._table.keys[0]):
            return alone
        look_up = self._back_off if self._compiled is None else self._machine_code
        return look_up(contexts[..., -length:], candidates, alone)

    def _machine_code(self, contexts: Array, candidates: Array, alone: Array) -> Array:
        """As `_back_off`."""
        assert self._compiled is not None
        table, width = self._table, candidates.shape[-1]
        shape = (*contexts.shape[:-1], width)
        # Fresh arrays of one layout: each other one would be compiled for anew.
        found, wanted = (np.array(np.broadcast_to(part, shape), order="C") for part in (alone, candidates))
        flat = (part.reshape(-1, part.shape[-1]) for part in (found, np.array(contexts, order="C"), wanted))
        self._compiled(*flat, table.spec.bits, table.unigrams, tuple(table.keys), tuple(table.counts))
        return found

    def _back_off(self, contexts: Array, candidates: Array, found: Array) -> Array:
        """What contexts of 1 to C < n tokens say, in place of what was `found` without."""
        table, width = self._table, candidates.shape[-1]
        bits = table.spec.bits
        # Where a token or a shorter context is unknown, keys are negative, and in no table.
        packed = contexts[..., -1]
        totals = table.unigrams.take(packed)
        packed = np.where(totals, packed, -1)
        for length in range(1, contexts.shape[-1] + 1):
            keys, counts = table.keys[length - 1], table.counts[length - 1]
            if not len(keys):
                break
            wanted = (packed << bits)[..., None] | candidates
            if length < contexts.shape[-1]:
                # The longer context is an n-gram of this order, too.
                packed = contexts[..., -length - 1] << (length * bits) | packed
                wanted = np.concatenate([wanted, packed[..., None]], axis=-1)
            places = keys.searchsorted(wanted)
            there = keys.take(places, mode="clip") == wanted
            often = counts.take(places, mode="clip")
            found = np.where(there[..., :width], often[..., :width] / totals[..., None], found)
            if length < contexts.shape[-1]:
                totals = often[..., width] * there[..., width]
                packed = np.where(totals, packed, -1)
        return np.minimum(found, 1.0)


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
    """`HostNgrams._back_off` as machine code, made on first use; None without numba (the extra `fast`)."""
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
    def behind(found, context, tokens, bits, unigrams, keys, counts):  # type: ignore[no-untyped-def]
        packed = 0
        for length in range(1, min(len(keys), len(context)) + 1):
            token = context[len(context) - length]
            if token < 0:
                return
            packed |= token << ((length - 1) * bits)
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
    def back_off(found, contexts, tokens, bits, unigrams, keys, counts):  # type: ignore[no-untyped-def]
        for row in range(len(contexts)):
            behind(found[row], contexts[row], tokens[row], bits, unigrams, keys, counts)

    return back_off
