"""Norms and rotation of queries and keys, and what is written to the cache, in one Triton kernel before attention's.

Between projections and attention, models of Llama's form norm the heads of q and k (Qwen3), rotate them by their
positions and put k and v into the cache: three kernels after `torch.compile`, one here. Which modules have that form is
not read from their class: each is held against its own forward on random numbers before it is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_dart.engine import triton_kernels as kernels
from hf_dart.engine.cache import FixedLayer
from hf_dart.engine.tree_attention import TreeMask, counters, tree_attention
from hf_dart.engine.trial import allowance
from hf_dart.engine.triton_kernels import tl, triton
from hf_dart.target.masks import MaskKind
from hf_dart.target.packed import MASKS
from hf_dart.target.stand_in import StandIn, forward_before

_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "layer_idx", "scaling", "config")
_SLOTS, _NODES = 4, 3  # of the trial


class HeadsForward(StandIn):
    """The forward of an attention of Llama's form over a captured round's cache; over others, its own.

    Args:
        attention: with projections q, k, v and o, and norms of the heads of q and k or none.
    """

    def __init__(self, attention: nn.Module) -> None:
        own: Any = attention
        self.attention = own
        norms = [getattr(own, name, None) for name in ("q_norm", "k_norm")]
        self._weights = [None if norm is None else norm.weight for norm in norms]
        self._eps = 0.0 if norms[0] is None else float(norms[0].variance_epsilon)

    def __call__(
        self,
        hidden_states: Tensor,  # [B, N, H]
        position_embeddings: Any = None,  # cos and sin, [B, N, D] each
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Any:
        own = self.attention
        places = self.places(attention_mask, past_key_values, kwargs)
        if places is None:
            return type(own).forward(
                own,
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        parts = [part(hidden_states) for part in (own.q_proj, own.k_proj, own.v_proj)]
        return own.o_proj(self.attend(parts, position_embeddings, places)), None

    def places(self, mask: Tensor | None, cache: Cache | None, told: dict[str, Any]) -> tuple[Any, ...] | None:
        """Where keys and values go and what is seen of them, for `write_and_attend`; None outside of captured rounds.

        Args:
            mask, cache, told: of the forward; among what it was told besides is what attends under the mask.
        """
        layer = None if cache is None else cache.layers[self.attention.layer_idx]
        seen = next((seen for known, seen in told.get(MASKS, ()) if known is mask), None)
        if not isinstance(layer, FixedLayer) or not isinstance(seen, TreeMask):
            return None
        return layer.keys, layer.values, layer.computed, *seen.places

    def attend(self, parts: Sequence[Tensor], position_embeddings: Any, places: tuple[Any, ...]) -> Tensor:
        """[B, N, H] of queries, keys and values [B, N, heads D] as they were projected; `places` as the method has it.

        Args:
            position_embeddings: cos and sin, [B, N, D] each.
        """
        shape, own = parts[0].shape[:-1], self.attention
        heads = [part.view(*shape, -1, own.head_dim) for part in parts]
        mixed = write_and_attend(*heads, *self._weights, self._eps, *position_embeddings, *places, float(own.scaling))
        return mixed.reshape(*shape, -1)


@torch.no_grad()
def forwards_of(target: PreTrainedModel) -> tuple[HeadsForward, ...]:
    """One for each attention of the target that computes the same by it; nothing is left in the target."""
    found = []
    for part in target.modules():
        if all(hasattr(part, name) for name in _PARTS) and forward_before(vars(part).get("forward")) is None:
            try:
                forward = HeadsForward(part)
            except Exception:  # it has another form
                continue
            if computes_the_same(part, forward, part):
                found.append(forward)
    return tuple(found)


def computes_the_same(own: nn.Module, forward: StandIn, attention: Any) -> bool:
    """Do a module and what is to replace it give the same, and write the same to a cache, on random numbers?

    Args:
        own: an attention of Llama's form, or a layer that has it.
        forward: what is to replace its forward.
        attention: that one.
    """
    try:
        pairs = list(zip(*_tried(own, forward, attention), strict=True))
    except Exception:  # it has another form, or the kernel cannot run here
        return False
    return all(float((one - other).abs().max()) <= allowance(one) for one, other in pairs)


def _tried(own: Any, forward: Any, attention: Any) -> list[list[Tensor]]:
    """What both give for the same: outputs, keys and values."""
    weight = attention.q_proj.weight
    heads = attention.k_proj.out_features // attention.head_dim
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(weight)

    hidden, angles = random(1, _NODES, attention.q_proj.in_features), random(1, _NODES, attention.head_dim // 2)
    turned = [part(torch.cat([angles, angles], -1)) for part in (torch.cos, torch.sin)]
    cached = random(2, 1, heads, _SLOTS + _NODES, attention.head_dim)
    ancestors = torch.ones(1, _NODES, _NODES, dtype=torch.bool, device=weight.device).tril()
    lengths = torch.full((1,), _SLOTS, device=weight.device)
    positions = _SLOTS + torch.arange(_NODES, device=weight.device)[None]
    kind, done = MaskKind("full_attention", None, 0), counters(weight.device)
    seen = TreeMask.of(kind, ancestors, positions, lengths, _SLOTS, done)
    mask = torch.zeros(1, 1, _NODES, _SLOTS + _NODES).to(weight)
    mask[..., _SLOTS:].masked_fill_(~ancestors, torch.finfo(weight.dtype).min / 2)
    results = []
    for compute, told in ((partial(type(own).forward, own), {}), (forward, {MASKS: [(mask, seen)]})):
        keys, values = cached.clone().unbind()
        cache = Cache(layers=[FixedLayer(keys, values, _NODES, None)] * (attention.layer_idx + 1))
        given = {"position_embeddings": turned, "attention_mask": mask, "past_key_values": cache, **told}
        found = compute(hidden, **given)
        results.append([*(part for part in (found if own is attention else [found]) if part is not None), keys, values])
    return results


# That keys and values are written to is not declared: they share a storage, of which compiled code would make a copy in
# every layer, to copy it back. Nothing else in the graph of a round reads what is written, so nothing can read it too
# early or too late; the commit, which does, is a graph of its own.
@torch.library.custom_op("hf_dart::write_and_attend", mutates_args=())
def write_and_attend(
    query: Tensor, key: Tensor, value: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, eps: float,
    cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, computed: Tensor | None, words: Tensor,
    first: Tensor | None, lengths: Tensor, done: Tensor, slots: int, scale: float,
) -> Tensor:  # fmt: skip
    """Norm and rotate queries and keys, put keys and values into the cache, and attend.

    Args:
        query, key, value: [B, N, heads, D] as they were projected, or [1, M, heads, D] of `computed`.
        query_weight, key_weight, eps: [D] of their norms; None for none.
        cos, sin: [B or 1, N, D], or [1, M, D].
        keys, values: [B, heads, T + N, D], written to.
        computed: [M] nodes of all rows, as `FixedCache.computed`; None for all.
        words, first, lengths, done, slots: of a `TreeMask`.

    Returns:
        What is mixed, of the shape of `query`, contiguous.
    """
    rotated = _written(query, key, value, query_weight, key_weight, eps, cos, sin, keys, values, computed, slots)
    if computed is None:
        return tree_attention(rotated.transpose(1, 2), keys, values, words, first, lengths, done, slots, scale)
    rows, nodes = words.shape[:2]
    trees = rotated.new_zeros(rows * nodes, *rotated.shape[2:]).index_copy(0, computed, rotated[0])
    trees = trees.unflatten(0, (rows, nodes)).transpose(1, 2)
    mixed = tree_attention(trees, keys, values, words, first, lengths, done, slots, scale)
    return mixed.flatten(0, 1)[computed][None]


@write_and_attend.register_fake
def _(query: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _written(
    query: Tensor, key: Tensor, value: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, eps: float,
    cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, computed: Tensor | None, slots: int,
) -> Tensor:  # fmt: skip
    """Keys and values are written; the queries [B, N, H, D]. Arguments as for `write_and_attend`."""
    batch, nodes, heads, width = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    query, key, value = (part if part.stride()[2:] == (width, 1) else part.contiguous() for part in (query, key, value))
    cos, sin = (part.expand(batch, -1, -1).contiguous() for part in (cos, sin))
    weights = (query, key) if query_weight is None else (query_weight, key_weight)  # or anything, if not read
    kernels.write_heads[(batch * nodes, heads + 2 * key.shape[2])](
        *(query, key, value, *weights, cos, sin, keys, values, query if computed is None else computed, out),
        *(*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *cos.stride()[:2]),
        *(*keys.stride()[:3], *values.stride()[:3], nodes, slots, keys.shape[2] - slots, eps),
        H=heads,
        KV=key.shape[2],
        HALF=width // 2,
        WIDTH=triton.next_power_of_2(width // 2),
        SHARED=computed is not None,
        NORMED=query_weight is not None,
        ACC=tl.float64 if query.dtype == torch.float64 else tl.float32,
        num_warps=1,
    )
    return out
