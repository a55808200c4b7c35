"""Attention of trees that follow cached texts, by FlexAttention: it passes over blocks of keys that nobody sees.

PyTorch's own, the plain alternative to `hf_dart.engine.tree_attention`, which needs no kernel of ours:
heads of a group share keys there, too. In compiled rounds a kernel is made of it; else it computes all scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from hf_dart.engine.compiling import compiled

_BLOCK = 128  # queries and keys of a block, FlexAttention's own choice


@dataclass(frozen=True)
class FlexMask:
    """What the nodes of trees see in the layers of one kind; attends under that.

    Attributes:
        seen: [B, 1, N, S] bool.
        blocks: how many blocks of keys each block of queries sees in part
            [B, 1, n] and which [B, 1, n, s], those first, and the same of those that it sees as a whole.
    """

    seen: Tensor
    blocks: tuple[Tensor, Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, mask: Tensor) -> FlexMask:
        """That of a mask [B, 1, N, S]: True, or 0, where a key is seen."""
        seen = mask if mask.dtype == torch.bool else mask == 0
        padded = torch.nn.functional.pad(seen, (0, -seen.shape[3] % _BLOCK, 0, -seen.shape[2] % _BLOCK))
        parts = padded.unflatten(3, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK)).sum((3, 5))
        counts: list[Tensor] = []
        for chosen in ((parts > 0) & (parts < _BLOCK**2), parts == _BLOCK**2):
            chosen = chosen.int()
            counts += [
                chosen.sum(-1, dtype=torch.int32),
                torch.argsort(chosen, dim=-1, descending=True, stable=True).int(),
            ]
        return cls(seen, (counts[0], counts[1], counts[2], counts[3]))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Queries [B, H, N, D], keys [B, H / g, S, D] and values [B, H / g, S, E] to [B, N, H, E]."""
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, self.seen, *self.blocks, scale, torch.compiler.is_compiling())


# An operation of its own, since the state that transformers' forwards keep while they are traced is lost where
# FlexAttention is traced among them (PyTorch 2.13): later forwards would return no hidden states.
@torch.library.custom_op("hf_dart::flex_attention", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, some: Tensor, in_part: Tensor, many: Tensor,
    as_a_whole: Tensor, scale: float, compiles: bool,
) -> Tensor:  # fmt: skip
    """FlexAttention under a `FlexMask`, by a kernel that is compiled for it or not; shapes as there."""

    def sees(row: Tensor, head: Tensor, node: Tensor, entry: Tensor) -> Tensor:
        return seen[row, 0, node, entry]

    lengths, unused, size = (query.shape[2], key.shape[2]), (None,) * 4, (_BLOCK, _BLOCK)
    blocks = flex.BlockMask(lengths, some, in_part, many, as_a_whole, *unused, size, sees)
    by: Any = _compiled(query.shape, key.shape) if compiles else flex.flex_attention
    mixed = by(query, key, value, block_mask=blocks, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return mixed.transpose(1, 2).contiguous()


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    batch, heads, nodes, _ = query.shape
    return query.new_empty(batch, nodes, heads, value.shape[3])


@cache
def _compiled(*shapes: torch.Size) -> Any:
    """FlexAttention's kernel for these shapes: Dynamo would leave a function uncompiled that has had too many."""
    return compiled(flex.flex_attention, "inductor")
