"""The decoder layer of a draft head, and rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.drafters.base_config import DrafterConfig
from hf_dart.models.attention import attend_in_groups

KeyValueWriter = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function that keeps keys and values [B, kv heads, Q, head_dim] and returns all [B, kv heads, S, head_dim]."""


def memory(state: SlotCache, layer: int, slots: Tensor | int, keys: slice) -> KeyValueWriter:
    """Return a function that writes a layer's new keys and values to `slots` and returns those of slots `keys`."""

    def remember(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        written = state.store.write(2 * layer, key, slots), state.store.write(2 * layer + 1, value, slots)
        return written[0][:, :, keys], written[1][:, :, keys]

    return remember


class DartAttention(nn.Module):
    """Grouped-query attention with rotary positions over an input of any width."""

    def __init__(
        self, config: DrafterConfig, input_size: int, *, bias: bool, output_bias: bool, qk_norm: bool = False
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=bias)
        self.k_proj = nn.Linear(input_size, key_size, bias=bias)
        self.v_proj = nn.Linear(input_size, key_size, bias=bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=output_bias)
        self.q_norm: nn.Module = nn.RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = nn.RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,  # [B, Q, input_size]
        rotation: tuple[Tensor, Tensor],  # cos, sin [B, 1, Q, head_dim]
        mask: Tensor | None,  # [B or 1, 1, Q, S] bool
        remember: KeyValueWriter | None,
        wanted: Tensor | slice | None = None,  # [B, W] entries that ask, instead of all Q; the mask's queries are they
    ) -> Tensor:  # [B, Q or W, H]
        query = self.q_norm(self._heads(self.q_proj(take(x, wanted))))
        cos, sin = (part if wanted is None else take(part[:, 0], wanted)[:, None] for part in rotation)
        query = rotate(query, (cos, sin))
        key, value = self.keys_and_values(x, rotation)
        if remember is not None:
            key, value = remember(key, value)
        return self.o_proj(attend(query, key, value, mask).transpose(1, 2).flatten(2))

    def keys_and_values(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Project entries [B, Q, input_size] to keys and values, each [B, kv heads, Q, head_dim]."""
        key = self.k_norm(self._heads(self.k_proj(x)))
        return rotate(key, rotation), self._heads(self.v_proj(x))

    def _heads(self, x: Tensor) -> Tensor:  # [B, Q, n head_dim] -> [B, n, Q, head_dim]
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def attend(
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, H / g, S, D]
    value: Tensor,  # [B, H / g, S, D']
    mask: Tensor | None,  # [B or 1, 1, Q, S] bool
) -> Tensor:  # [B, H, Q, D']
    """Attention under a mask, if there is one, as is best for the device."""
    # On CUDA, with groups and a mask PyTorch would use a kernel that copies keys and values for every head.
    if mask is not None and query.is_cuda and not torch.is_grad_enabled():
        return attend_in_groups(query, key, value, mask)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


class DartLayer(nn.Module):
    """A decoder layer; the first one may attend over (embedding, features) `pairs` of width E + H.

    A `normed` one has a norm of its own in front of its attention; the halves of pairs are normed apart (section 3.1).
    """

    def __init__(self, config: DrafterConfig, *, pairs: bool, normed: bool) -> None:
        super().__init__()
        width = config.embedding_size + config.hidden_size if pairs else config.hidden_size
        self.input_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps) if normed else nn.Identity()
        attention = {"bias": config.attention_bias, "output_bias": config.output_bias, "qk_norm": config.qk_norm}
        self.self_attn = DartAttention(config, width, **attention)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        x: Tensor,  # [B, Q, E + H] pairs, else [B, Q, H]
        residual: Tensor,  # [B, Q, H]
        rotation: tuple[Tensor, Tensor],
        mask: Tensor,
        remember: KeyValueWriter | None,
        wanted: Tensor | slice | None = None,  # [B, W] entries whose output is wanted, or a slice; None is all
    ) -> Tensor:  # [B, Q or W, H]
        hidden = take(residual, wanted) + self.self_attn(self.input_norm(x), rotation, mask, remember, wanted)
        return hidden + self.mlp(self.mlp_norm(hidden))


def fusion_norm(config: Any) -> nn.Module | None:
    """Make the norm of the target's hidden states before `fc` fuses them, by the config's `fusion_norm`."""
    if config.fusion_norm == "joint":
        return nn.RMSNorm(config.features_width, config.rms_norm_eps)
    if config.fusion_norm == "each":
        return nn.ModuleList(nn.RMSNorm(config.feature_size, config.rms_norm_eps) for _ in config.feature_layers)
    return None


def fuse(features: Tensor, norm: nn.Module | None, fc: nn.Linear) -> Tensor:
    """Hidden states of the target [..., F] to features [..., H]."""
    if isinstance(norm, nn.ModuleList):
        parts = features.chunk(len(norm), dim=-1)
        features = torch.cat([one(part) for one, part in zip(norm, parts, strict=True)], dim=-1)
    elif norm is not None:
        features = norm(features)
    return fc(features)


def take(x: Tensor, wanted: Tensor | slice | None) -> Tensor:
    """Entries [B, W, H] of x [B, Q, H] by their numbers [B, W], or of a slice; all of them for None."""
    if isinstance(wanted, slice):
        return x[:, wanted]
    return x if wanted is None else x.gather(1, wanted[..., None].expand(-1, -1, x.shape[-1]))


def rotation_at(positions: Tensor, config: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin [B, 1, Q, head_dim] of `positions` [B, Q] (Su et al., arXiv 2104.09864, half-split layout).

    Frequencies are those of rope_theta, or rope_frequencies [head_dim / 2] and rope_scale of a config that has them.
    """
    own, scale = getattr(config, "rope_frequencies", None), getattr(config, "rope_scale", 1.0)
    given = None if own is None else tuple(own)
    frequencies = _frequencies(config.head_dim, config.rope_theta, given, positions.device)
    angles = positions[:, None, :, None] * frequencies
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


@torch.compiler.assume_constant_result
def _frequencies(head_dim: int, theta: float, own: tuple[float, ...] | None, device: torch.device) -> Tensor:
    """Rotary frequencies [head_dim], each twice; made once per device.

    `torch.compile` takes them for what they are, and does not look at how they are kept.
    """
    return _made_frequencies(head_dim, theta, own, device)


@cache  # captured rounds read them by address
def _made_frequencies(head_dim: int, theta: float, own: tuple[float, ...] | None, device: torch.device) -> Tensor:
    """Rotary frequencies [head_dim], each twice."""
    if own is not None:
        return torch.tensor(own + own, device=device, dtype=torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    return theta ** -torch.cat([exponents, exponents])


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn x [B, n, Q, head_dim] by cos and sin [B, 1, Q, head_dim]."""
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin
