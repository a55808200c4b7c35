"""The tokens that occur most often in data, for a draft vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def token_counts(rows: Iterable[dict[str, Any]], vocab_size: int) -> Tensor:
    """Count the tokens [V] of rows as `training.PackedTokens` has them: no padding, none outside of a `loss_mask`."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows:
        ids = torch.as_tensor(row["input_ids"])
        counted = torch.as_tensor(row["documents"]) >= 0 if "documents" in row else torch.ones_like(ids).bool()
        if "loss_mask" in row:
            counted &= torch.as_tensor(row["loss_mask"])
        counts += torch.bincount(ids[counted], minlength=vocab_size)
    return counts


def frequent_tokens(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """Return the `size` tokens that occur most often by their `counts` [V], ascending; what `reduce_vocabulary` takes.

    `always` are tokens to take in whatever their count, such as end and padding tokens.

    Raises:
        ValueError: there are fewer tokens, or more that are always taken in.
    """
    if not len(set(always)) < size <= len(counts):
        raise ValueError(f"size is {size}; give {len(set(always)) + 1} to {len(counts)} tokens.")
    counts = counts.clone()
    counts[list(always)] = torch.iinfo(torch.long).max
    # Among equals the smaller id: in byte-pair vocabularies it was merged earlier.
    return counts.argsort(descending=True, stable=True)[:size].sort().values
