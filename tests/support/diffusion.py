"""The training pass of a diffusion drafter, for one block."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dart import DiffusionDrafter


def one_pass(drafter: DiffusionDrafter, features: Tensor, tokens: Tensor, slots: list[int]) -> Tensor:
    """Logits [d, V] of a block, known tokens or `MASK`, after T tokens [T] with features [T, F]: the training pass."""
    text, size = len(tokens), len(tokens) + len(slots) - 1
    places = torch.arange(size)
    mask = (places <= places[:, None]) & (places > places[:, None] - drafter.config.context_window)
    mask[text:, text:] = True
    ids = torch.cat([tokens, torch.tensor(slots[:-1], dtype=torch.long)])
    hidden = drafter(ids[None], features[None], places[None], mask[None, None])
    return drafter.logits(hidden)[0, text - 1 :]
