"""Memory that tiers take turns in."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dart.cache.slot_cache import Zeros


class Memory:
    """Buffers by name, each as large as the largest that was asked for; the others of that name are views of it.

    One tier is loaded at a time, and what it holds is put there as it is loaded. So keys and values of tiers that
    differ in their trees, processors or rows lie in one place. A tier twice as long needs a larger buffer, while those
    in use stay where they are: graphs know them by their addresses.
    """

    def __init__(self) -> None:
        self._largest: dict[tuple[str, str, torch.dtype, torch.device], Tensor] = {}

    def of(self, owner: str) -> Zeros:
        """Return what makes the owner's buffers by name, of zeros; others of that name may be written over."""

        def zeros(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
            key, size = (owner, name, dtype, device), torch.Size(shape).numel()
            flat = self._largest.get(key)
            if flat is None or flat.numel() < size:
                flat = self._largest[key] = torch.empty(size, dtype=dtype, device=device)
            return flat[:size].view(shape).zero_()

        return zeros
