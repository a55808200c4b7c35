"""Decoder layers of Llama's form in six launches: four products with what stands around them, and attention's two.

After `torch.compile` such a layer of fused projections is nine launches: the norms with the additions to the residual
and the gate's product are kernels of their own, since a library's products cannot take them in. Ours
(`triton_kernels.multiply`) can: a norm is folded into the product after it, and silu(gate) * up and the addition into
the product before. Which layers have that form is not read from their class: each is held against its own forward on
random numbers before it is replaced (`forwards_of`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_dart.engine import triton_kernels as kernels
from hf_dart.engine.heads import HeadsForward, computes_the_same
from hf_dart.engine.triton_kernels import tl, triton
from hf_dart.target.fused import FusedLinears
from hf_dart.target.stand_in import StandIn, forward_before

_BLOCK_N, _BLOCK_K = 32, 64  # 128 programs for a product of 4096 columns: one for each multiprocessor of an H200
_STAGES = 4


class LayerForward(StandIn):
    """The forward of a decoder layer of Llama's form over a captured round's cache; over others, its own.

    Args:
        layer: with two norms, an attention and an MLP.
        heads: of its attention.
        projections, gates: its q, k and v, and its gate and up.
    """

    def __init__(self, layer: nn.Module, heads: HeadsForward, projections: FusedLinears, gates: FusedLinears) -> None:
        own: Any = layer
        self.layer, self._heads, self._projections, self._gates = own, heads, projections, gates
        self._norms = [(norm.weight, float(norm.variance_epsilon)) for norm in _norms(own)]
        self._last = [own.self_attn.o_proj, own.mlp.down_proj]

    def __call__(
        self,
        hidden_states: Tensor,  # [B, N, H]
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,  # cos and sin, [B, N, D] each
        **kwargs: Any,
    ) -> Any:
        places = self._heads.places(attention_mask, past_key_values, kwargs)
        if places is None:
            return type(self.layer).forward(
                self.layer,
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **kwargs,
            )
        projections, gates, (attended, fed) = self._projections, self._gates, self._last
        hidden = hidden_states.contiguous()
        parts = product(hidden, projections.weight, projections.bias, *self._norms[0], None, False)
        mixed = self._heads.attend(parts.split(projections.sizes, -1), position_embeddings, places)
        hidden = product(mixed, attended.weight, attended.bias, None, 0.0, hidden, False)
        gated = product(hidden, gates.weight, None, *self._norms[1], None, True)
        return product(gated, fed.weight, fed.bias, None, 0.0, hidden, False)


@torch.no_grad()
def forwards_of(
    target: PreTrainedModel, heads: Sequence[HeadsForward], linears: Sequence[FusedLinears]
) -> tuple[LayerForward, ...]:
    """One for each layer of the target that computes the same by it; nothing is left in the target.

    Args:
        heads: of attentions of the target that compute the same by those.
        linears: products of the target that are computed at once.
    """
    found = _candidates(target, heads, linears)
    return tuple(one for one in found if computes_the_same(one.layer, one, one.layer.self_attn))


def _candidates(
    target: PreTrainedModel, heads: Sequence[HeadsForward], linears: Sequence[FusedLinears]
) -> Iterator[LayerForward]:
    """Layers whose parts have names and kinds as in a layer of Llama's form, and no forwards of their own."""
    by_attention = {forward.attention: forward for forward in heads}
    by_first: dict[Any, Any] = {group.linears[0]: group for group in linears}
    for layer in target.modules():
        attention: Any = getattr(layer, "self_attn", None)
        mlp = getattr(layer, "mlp", None)
        forwards = (forward_before(vars(part).get("forward")) for part in layer.modules())
        if attention not in by_attention or any(forward is not None for forward in forwards):
            continue
        projections: Any = by_first.get(attention.q_proj)
        gates: Any = by_first.get(getattr(mlp, "gate_proj", None))
        last = (attention.o_proj, getattr(mlp, "down_proj", None))
        is_plain = all(type(linear) is nn.Linear and linear.weight.is_contiguous() for linear in last)
        has_norms = all(hasattr(norm, "weight") and hasattr(norm, "variance_epsilon") for norm in _norms(layer))
        if is_plain and has_norms and projections is not None and gates is not None and gates.bias is None:
            yield LayerForward(layer, by_attention[attention], projections, gates)


def _norms(layer: Any) -> list[Any]:
    return [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]


@torch.library.custom_op("hf_dart::product", mutates_args=())
def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, eps: float, added: Tensor | None, gated: bool
) -> Tensor:
    """`added` + norm(x) W^T + bias, or silu of the first half of that times the second.

    Args:
        x: [..., I], contiguous.
        weight: W [O, I], contiguous.
        bias: [O] or None.
        norm, eps: weight [I] of an RMS norm of `x`, or None, and its epsilon.
        added: [..., O], contiguous, or None.
        gated: of W are the first half rows of a gate; without bias.

    Returns:
        [..., O], or where gated [..., O / 2].
    """
    rows, (width, size) = x.numel() // x.shape[-1], weight.shape
    width = width // 2 if gated else width
    out = x.new_empty(*x.shape[:-1], width)
    block = min(64, max(16, triton.next_power_of_2(rows)))
    # Rows first: programs that read the same weights run side by side.
    kernels.multiply[(triton.cdiv(rows, block), triton.cdiv(width, _BLOCK_N))](
        *(x, weight, x if bias is None else bias, x if norm is None else norm, x if added is None else added, out),
        *(rows, eps),
        IN=size,
        WIDTH=width,
        NORMED=norm is not None,
        GATED=gated,
        BIASED=bias is not None,
        ADDS=added is not None,
        BLOCK_M=block,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
        PRECISION="ieee",
        num_warps=4,
        num_stages=_STAGES,
    )
    return out


@product.register_fake
def _(x: Tensor, weight: Tensor, bias: Any, norm: Any, eps: float, added: Any, gated: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (2 if gated else 1))
