"""Vocabularies: hashes of token-to-id maps, and draft vocabularies that are a part of one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor

_NEVER = -1e30


def hash_of_ids(ids: Mapping[str, int], rows: int | None = None) -> str:
    """SHA-256 (16 hex digits) of a token-to-id map, without ids from `rows` (of an embedding table) on."""
    entries = sorted(ids.items(), key=itemgetter(1, 0))
    if rows is not None:
        entries = [entry for entry in entries if entry[1] < rows]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


def columns_of(tokens: Tensor, vocabulary: Tensor, missing: int) -> Tensor:
    """Columns of token ids [...] in a draft vocabulary [M]; `missing` for those outside."""
    columns = torch.searchsorted(vocabulary, tokens.contiguous()).clamp(max=len(vocabulary) - 1)
    return torch.where(vocabulary[columns] == tokens, columns, missing)


def token_ids(columns: Tensor, vocabulary: Tensor | None) -> Tensor:
    """Token ids of columns [...] of draft logits; with no draft vocabulary they are the same."""
    return columns if vocabulary is None else vocabulary[columns]


def spread(logits: Tensor, vocabulary: Tensor | None, vocab_size: int) -> Tensor:
    """Logits [..., M] of a draft vocabulary, or of a table of other height, as [..., V]; those outside get no mass."""
    if vocabulary is None:
        more = vocab_size - logits.shape[-1]
        return F.pad(logits, (0, more), value=_NEVER) if more else logits
    dtype = torch.promote_types(logits.dtype, torch.float32)
    everywhere = torch.full((*logits.shape[:-1], vocab_size), _NEVER, dtype=dtype, device=logits.device)
    return everywhere.index_copy(-1, vocabulary, logits.to(dtype))
