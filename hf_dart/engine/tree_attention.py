"""Attention of trees that follow cached texts, in one Triton kernel (`triton_kernels.attend_to_split`).

What SDPA does not: the keys of one row are split over many multiprocessors; a row's own length ends them, not the
tier's; what a node sees of its tree is one 64-bit word for 64 nodes, and of the text one number, the first slot in its
window; heads of a group share keys without a mask that is written out; queries, keys and values are read where they
lie, and the output is written as the next product reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dart.engine import triton_kernels as kernels
from hf_dart.engine.triton_kernels import LOG2_E, tl, triton
from hf_dart.target.masks import MaskKind

_WORD = 64
_PROGRAMS = 2
"""Programs for each multiprocessor, where keys can be split for them."""
_MULTIPROCESSORS = 132  # of an H100 or H200; where there is no device to be asked


@dataclass(frozen=True)
class TreeMask:
    """What the nodes of trees see in the layers of one kind; attends under that.

    Attributes:
        words: [B, N, W] int64; node j of the tree is bit j % 64 of word j // 64.
        first: [B, N] int32, the first slot of the text that is seen, of those before the row's length; None for all.
        lengths: [B] committed tokens.
        slots: T; the tree stands in the slots from T on.
        done: [P] int32, programs that are done with parts of one block of queries: 0 before and after each attention.
    """

    words: Tensor
    first: Tensor | None
    lengths: Tensor
    slots: int
    done: Tensor

    @classmethod
    def of(
        cls, kind: MaskKind, ancestors: Tensor, positions: Tensor, lengths: Tensor, slots: int, done: Tensor
    ) -> TreeMask:
        """That of nodes at `positions` [B, N], under `ancestors` [B, N, N], after rows of `lengths` [B].

        Args:
            done: of `counters`; masks that are never attended under at the same time may share one.
        """
        horizon = kind.horizon(positions)
        first = None
        if horizon is not None:
            first = (horizon + 1).clamp(min=0).int()
            ancestors = ancestors & (positions[:, None] > horizon[..., None])
        return cls(as_words(ancestors), first, lengths, slots, done)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Queries [B, H, N, D], keys [B, H / g, S, D] and values [B, H / g, S, E] to [B, N, H, E]."""
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return tree_attention(query, key, value, *self.places, scale)

    @property
    def places(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor, int]:
        """All of it, in the order of `tree_attention`'s arguments."""
        return self.words, self.first, self.lengths, self.done, self.slots


def counters(device: torch.device) -> Tensor:
    """A `TreeMask.done`."""
    return torch.zeros(_wanted(device), dtype=torch.int32, device=device)


def as_words(seen: Tensor) -> Tensor:
    """[..., N] bool as [..., W] int64, 64 in a word."""
    padded = torch.nn.functional.pad(seen, (0, -seen.shape[-1] % _WORD)).unflatten(-1, (-1, _WORD))
    return (padded.long() << torch.arange(_WORD, device=seen.device)).sum(-1)


# That `done` is written to is not declared: whoever reads it finds zeros, before and after.
@torch.library.custom_op("hf_dart::tree_attention", mutates_args=())
def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, words: Tensor, first: Tensor | None, lengths: Tensor, done: Tensor,
    slots: int, scale: float,
) -> Tensor:  # fmt: skip
    """Attention under a `TreeMask`; its shapes are those of `TreeMask.__call__`."""
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    batch, heads, nodes, width = query.shape
    kv, out_width = key.shape[1], value.shape[3]
    group = heads // kv
    accumulate = torch.promote_types(query.dtype, torch.float32)
    block_q = min(64, max(16, triton.next_power_of_2(group * nodes)))
    blocks = triton.cdiv(group * nodes, block_q)
    block_k = 64 if width <= 128 and accumulate == torch.float32 else 32
    splits = _splits(query.device, batch * kv * blocks, triton.cdiv(slots, block_k))
    out = query.new_empty(batch, nodes, heads, out_width)
    part = peak = out  # not written
    if splits > 1:
        part = query.new_empty(batch * kv, splits, group * nodes, out_width, dtype=accumulate)
        peak = query.new_empty(batch * kv, splits, group * nodes, dtype=accumulate)
    sizes = {"KV": kv, "G": group, "N": nodes, "E": out_width, "SPLITS": splits}
    sizes |= {"OUT_WIDTH": max(16, triton.next_power_of_2(out_width))}
    sizes |= {"ACC": tl.float64 if accumulate == torch.float64 else tl.float32}
    kernels.attend_to_split[(batch * kv, blocks, splits)](
        *(query, key, value, words, words if first is None else first, lengths, part, peak, done, out),
        *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3]),
        *(slots, scale * LOG2_E),
        W=words.shape[-1],
        D=width,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        WIDTH=max(16, triton.next_power_of_2(width)),
        NODES=triton.next_power_of_2(nodes),
        WINDOWED=first is not None,
        PRECISION="ieee",
        num_warps=4,
        num_stages=2,
        **sizes,
    )
    return out


@tree_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: object) -> Tensor:
    batch, heads, nodes, _ = query.shape
    return query.new_empty(batch, nodes, heads, value.shape[3])


def _splits(device: torch.device, programs: int, blocks: int) -> int:
    """Into how many parts keys of so many blocks are split, where `programs` would not fill the device."""
    return max(1, min(32, blocks // 2, triton.cdiv(_wanted(device), programs)))


def _wanted(device: torch.device) -> int:
    """Programs that fill the device; as many or more are not split."""
    processors = _MULTIPROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROGRAMS * processors
