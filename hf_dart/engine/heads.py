"""Norms and rotation of queries and keys, and what is written to the cache, in one Triton kernel.

Between projections and attention, models of Llama's form norm the heads of q and k (Qwen3), rotate them by their
positions and put k and v into the cache: three kernels after `torch.compile`, one here. Which modules have that form is
not read from their class: each is held against its own forward on random numbers before it is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_dart.engine import triton_kernels as kernels
from hf_dart.engine.cache import FixedLayer
from hf_dart.engine.trial import allowance
from hf_dart.engine.triton_kernels import tl, triton
from hf_dart.target.stand_in import StandIn, forward_before

_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "layer_idx", "scaling", "config")
_NODES = 3  # of the trial


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
        layer = None if past_key_values is None else past_key_values.layers[own.layer_idx]
        if not isinstance(layer, FixedLayer):
            return type(own).forward(
                own,
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        shape = hidden_states.shape[:-1]
        parts = [part(hidden_states).view(*shape, -1, own.head_dim) for part in (own.q_proj, own.k_proj, own.v_proj)]
        first = layer.keys.shape[2] - layer.nodes
        query = write_heads(
            *parts, *self._weights, self._eps, *position_embeddings, layer.keys, layer.values, layer.computed, first
        )
        attend = ALL_ATTENTION_FUNCTIONS[own.config._attn_implementation]
        mixed, weights = attend(
            own, query.transpose(1, 2), layer.keys, layer.values, attention_mask, scaling=own.scaling, **kwargs
        )
        return own.o_proj(mixed.reshape(*shape, -1)), weights



@torch.no_grad()
def forwards_of(target: PreTrainedModel) -> tuple[HeadsForward, ...]:
    """One for each attention of the target that computes the same by it; nothing is left in the target."""
    found = []
    for part in target.modules():
        if all(hasattr(part, name) for name in _PARTS) and forward_before(vars(part).get("forward")) is None:
            try:
                forward = HeadsForward(part)
                same = _is_the_same(forward)
            except Exception:  # it has another form, or the kernel cannot run here
                continue
            if same:
                found.append(forward)
    return tuple(found)


def _is_the_same(forward: HeadsForward) -> bool:
    """Do an attention and what is to replace it give the same, and write the same to a cache, on random numbers?"""
    own = forward.attention
    weight = own.q_proj.weight
    heads = own.k_proj.out_features // own.head_dim
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(weight)

    hidden, angles = random(1, _NODES, own.q_proj.in_features), random(1, _NODES, own.head_dim // 2)
    turned = [part(torch.cat([angles, angles], -1)) for part in (torch.cos, torch.sin)]
    mask = torch.zeros(1, 1, _NODES, _NODES).to(weight)
    results = []
    for compute in (type(own).forward, HeadsForward.__call__):
        keys, values = random(2, 1, heads, _NODES, own.head_dim).zero_().unbind()
        layer = FixedLayer(keys, values, _NODES, None)
        cache = Cache(layers=[layer] * (own.layer_idx + 1))
        given = own if compute is type(own).forward else forward
        made = compute(given, hidden, position_embeddings=turned, attention_mask=mask, past_key_values=cache)[0]
        results.append((made, keys, values))
    return all(
        float((one - other).abs().max()) <= allowance(one) for one, other in zip(*results, strict=True)
    )


@torch.library.custom_op("hf_dart::write_heads", mutates_args=("keys", "values"))
def write_heads(
    query: Tensor, key: Tensor, value: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, eps: float,
    cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, computed: Tensor | None, first: int,
) -> Tensor:  # fmt: skip
    """Norm and rotate queries and keys, and put keys and values into the cache.

    Args:
        query, key, value: [B, N, heads, D] as they were projected.
        query_weight, key_weight, eps: [D] of their norms; None for none.
        cos, sin: [B or 1, N, D].
        keys, values: [B, heads, T + N, D], written to.
        computed: [N] nodes of all rows, as `FixedCache.computed`; None for all.
        first: T.

    Returns:
        The queries [B, N, H, D].
    """
    batch, nodes, heads, width = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    query, key, value = (part if part.stride()[2:] == (width, 1) else part.contiguous() for part in (query, key, value))
    cos, sin = (part.expand(batch, -1, -1).contiguous() for part in (cos, sin))
    weights = (query, key) if query_weight is None else (query_weight, key_weight)  # or anything, if not read
    kernels.write_heads[(batch * nodes, heads + 2 * key.shape[2])](
        *(query, key, value, *weights, cos, sin, keys, values, query if computed is None else computed, out),
        *(*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *cos.stride()[:2]),
        *(*keys.stride()[:3], *values.stride()[:3], nodes, first, keys.shape[2] - first, eps),
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


@write_heads.register_fake
def _(query: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)
