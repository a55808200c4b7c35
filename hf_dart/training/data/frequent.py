"""The tokens that occur most often in data, for a draft vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def frequent_tokens(rows: Iterable[dict[str, Any]], size: int, vocab_size: int, always: Sequence[int] = ()) -> Tensor:
    """Return the `size` tokens that occur most often in `rows`, ascending; what `DartHead.reduce_vocabulary` takes.

    Args:
        rows: as those of `training.PackedTokens`: `input_ids` [T] and, where rows are padded, `documents` [T], -1 for
            padding.
        size: M.
        vocab_size: V of the target.
        always: tokens to take in whatever their count, such as end and padding tokens.

    Raises:
        ValueError: M is out of range.
    """
    if not len(set(always)) < size <= vocab_size:
        raise ValueError(f"size is {size}; give {len(set(always)) + 1} to {vocab_size} tokens.")
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows:
        ids = torch.as_tensor(row["input_ids"])
        if "documents" in row:
            ids = ids[torch.as_tensor(row["documents"]) >= 0]
        counts += torch.bincount(ids, minlength=vocab_size)
    counts[list(always)] = torch.iinfo(torch.long).max
    # Among equals the smaller id: in byte-pair vocabularies it was merged earlier.
    return counts.argsort(descending=True, stable=True)[:size].sort().values
