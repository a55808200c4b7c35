"""Memory that tiers take turns in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Memory:
    """Buffers by name, each as large as the largest that was asked for; the others of that name are views of it.

    One tier is loaded at a time, and what it holds is put there as it is loaded. So keys and values of tiers that
    differ in their trees, processors or rows lie in one place. A tier twice as long needs a larger buffer, while those
    in use stay where they are: graphs know them by their addresses.
    """

    def __init__(self) -> None:
        self._largest: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def of(self, owner: str) -> Callable[[str, tuple[int, ...], torch.dtype, torch.device], Tensor]:
        """Return a function that does what `zeros` does, for names that other owners do not use."""
        return lambda name, *what: self.zeros(f"{owner}: {name}", *what)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer of that name. Others of that name may be written over."""
        key, size = (name, dtype, device), torch.Size(shape).numel()
        flat = self._largest.get(key)
        if flat is None or flat.numel() < size:
            flat = self._largest[key] = torch.empty(size, dtype=dtype, device=device)
        return flat[:size].view(shape).zero_()
