"""Attention of a whole tree under a mask without copies of the cache.

Stock's SDPA repeats keys and values for every query head of a group as soon as there is a mask: with 4 heads per
group the cache is written out four times larger in every layer of every round. Here the queries of a group stand
side by side instead (`layers.attend_in_groups`), and keys and values are read where they lie. Their mask is made once
for all layers of a kind. Each tier's cache is no longer than the text needs, so that the cost follows the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_dart.drafters.layers import attend_in_groups, for_groups
from hf_dart.engine.cache import FixedCache
from hf_dart.target.attention import PACKED, attention_of
from hf_dart.target.verify import Verifier

NODES = "hf_dart_nodes"
"""The argument that targets hand down to it when nodes of several rows are run as one (`budget`)."""

MASKS = "hf_dart_masks"
"""The argument that targets hand down to it with pairs of a mask and itself as groups of queries need it."""

# The name stands in the target's config, where calls of other threads find it, too; they are to compute as ever.
_here: ContextVar[bool] = ContextVar("_here", default=False)
_naming = Lock()
_inside: dict[int, int] = {}  # by the config, how many are inside of `packed` with it


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, H / g, S, D]
    value: Tensor,  # [B, H / g, S, D']
    attention_mask: Tensor | None,  # [B, 1, N, S]
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [B, N, H, D']
    """Attention with the interface of transformers' `sdpa_attention_forward`.

    All but a round's masked queries are taken in groups, too.
    """
    nodes, groups = kwargs.pop(NODES, None), query.shape[1] // key.shape[1]
    for_all = _made_before(attention_mask, kwargs.pop(MASKS, ()), groups)
    if nodes is not None:
        return _of_shared_trees(query, key, value, attention_mask, for_all, nodes, scaling), None
    shared_mask = attention_mask is not None and attention_mask.shape[1] == 1
    # What is compiled is a round of ours.
    ours = torch.compiler.is_compiling() or _here.get()
    if not ours or groups == 1 or not shared_mask or dropout or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    assert for_all is not None
    return attend_in_groups(query, key, value, for_all, scaling).transpose(1, 2).contiguous(), None


def _made_before(mask: Tensor | None, pairs: Sequence[tuple[Tensor, Tensor]], groups: int) -> Tensor | None:
    """A layer's mask as its groups need it, if it was made for all layers; else as it is."""
    for own, grouped in pairs:
        if own is mask and grouped.shape[2] == groups * own.shape[2]:
            return grouped
    return mask


def _of_shared_trees(
    query: Tensor,  # [1, H, M, D]
    key: Tensor,  # [B, H / g, S, D]
    value: Tensor,  # [B, H / g, S, D']
    mask: Tensor | None,  # [B, 1, N, S]
    for_all: Tensor | None,  # the same, or for groups
    nodes: Tensor,  # [M] of B N
    scaling: float | None,
) -> Tensor:  # [1, M, H, D']
    """Queries of nodes here and there in B trees (`budget`), which go back into their trees for this."""
    assert mask is not None
    assert for_all is not None
    batch, size = mask.shape[0], mask.shape[2]
    heads, width = query.shape[1], query.shape[3]
    trees = query.new_zeros(batch * size, heads, width).index_copy(0, nodes, query[0].transpose(0, 1))
    mixed = attend_in_groups(trees.view(batch, size, heads, width).transpose(1, 2), key, value, for_all, scaling)
    return mixed.transpose(1, 2).flatten(0, 1)[nodes][None]


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)


class PackedVerifier(Verifier):
    """A verifier on fixed shapes, which tells `packed_attention` what that need not find out in every layer.

    Args:
        like: of a call; its rows' shifts of positions are to be filled in (`load`).
        cache: where the committed tokens of B rows are.
        hands_down: does the target hand arguments that it does not know down to its attention?
    """

    def __init__(self, like: Verifier, cache: FixedCache, hands_down: bool) -> None:
        shift = like.shift
        if shift is not None:
            with torch.inference_mode(False):  # as all that a round reads
                size = (*shift.shape[:-1], len(cache.lengths))
                shift = torch.zeros(size, dtype=shift.dtype, device=cache.lengths.device)
        super().__init__(like.target, cache, like.kinds, like.feature_layers, shift=shift)
        self._hands_down = hands_down

    def load(self, like: Verifier, seats: Sequence[int]) -> None:
        """Take over the shifts of positions of a call's rows `seats` [B]."""
        if self.shift is not None and like.shift is not None:
            self.shift.copy_(like.shift[..., list(seats)])

    def extra_inputs(self, masks: Tensor | dict[str, Tensor], computed: Tensor | None) -> dict[str, Any]:
        if not self._hands_down:
            return {}
        heads = self.target.config.get_text_config(decoder=True).num_attention_heads
        pairs = []
        for kind, mask in zip(self.kinds, masks.values() if isinstance(masks, dict) else [masks], strict=True):
            groups = heads // self.cache.cache.layers[kind.layer].keys.shape[1]
            pairs.append((mask, for_groups(mask, groups)))
        return {MASKS: pairs} if computed is None else {MASKS: pairs, NODES: computed}


@contextmanager
def packed(target: PreTrainedModel) -> Iterator[None]:
    """Let a target that attends by SDPA use `packed_attention` meanwhile, in this thread."""
    text = target.config.get_text_config(decoder=True)
    if attention_of(target) != "sdpa":
        yield
        return
    with _naming:  # whoever comes first sets the name, and whoever goes last sets it back
        _inside[id(text)] = _inside.get(id(text), 0) + 1
        text._attn_implementation = PACKED
    token = _here.set(True)
    try:
        yield
    finally:
        _here.reset(token)
        with _naming:
            _inside[id(text)] -= 1
            if not _inside[id(text)]:
                del _inside[id(text)]
                text._attn_implementation = "sdpa"
