"""Weights of other projects' drafters: their names, and the vocabulary that is mapped to the target's by offsets."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hf_dart.hub.checkpoint import read_tensors


def renamed(name: str, table: Mapping[str, str]) -> str:
    """Return a name after all renamings of a table, from patterns to replacements, one after the other."""
    for pattern, replacement in table.items():
        name = re.sub(pattern, replacement, name)
    return name


def read_weights(
    files: Iterable[str | Path],
    path: str,
    names: Mapping[str, str],  # theirs by ours
    shapes: Mapping[str, tuple[int, ...]],  # theirs by our names
    *,
    vocab_size: int,
    draft_vocab_size: int | None,
    per_token: Collection[str] = ("lm_head.weight",),  # our names of weights with a row for each token that is scored
    ignored: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return weights by our names, and `draft_vocabulary` [M] if there is one."""
    wanted = {theirs: shapes[ours] for ours, theirs in names.items()}
    wanted |= {"d2t": (draft_vocab_size or vocab_size,), "t2d": (vocab_size,)}
    tensors = read_tensors(
        files,
        path,
        wanted,
        optional=("t2d",) if draft_vocab_size else ("d2t", "t2d"),
        ignored=ignored,
        dtypes={"d2t": torch.int64, "t2d": torch.bool},
    )
    weights = {ours: tensors[theirs] for ours, theirs in names.items()}
    if draft_vocab_size:
        weights["draft_vocabulary"], rows = _draft_tokens(path, tensors["d2t"], tensors.get("t2d"), vocab_size)
        weights |= {name: weights[name][rows] for name in weights.keys() & set(per_token)}
    elif "d2t" in tensors and bool(tensors["d2t"].any()):
        raise ValueError(f"The d2t of {path} moves tokens although the head scores all of them; fetch it again.")
    return weights


def _draft_tokens(path: str, d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return ids of the tokens that are scored [M], ascending, and the rows of the LM head in that order.

    `d2t` [M] is what is to be added to a draft token to get the target's; `t2d` [V] bool says again which are scored.
    """
    tokens = torch.arange(len(d2t)) + d2t
    inside = (tokens >= 0) & (tokens < vocab_size)
    if not bool(inside.all()) or len(tokens.unique()) < len(tokens):
        raise ValueError(f"The d2t of {path} names tokens twice or beyond the vocabulary; fetch it again.")
    if t2d is not None and not torch.equal(vocabulary_maps(tokens, vocab_size)["t2d"], t2d):
        raise ValueError(f"The d2t and t2d of {path} name different tokens; fetch it again.")
    return tokens.sort()


def vocabulary_maps(vocabulary: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return `d2t` [M] and `t2d` [V] of a draft vocabulary [M], as `read_weights` reads them."""
    tokens = vocabulary.cpu()
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": marked}
