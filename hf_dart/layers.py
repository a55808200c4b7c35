"""The decoder layer of a draft head, and rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dart.configuration import DartConfig

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class DartAttention(nn.Module):
    """Grouped-query attention with rotary positions over an input of any width."""

    def __init__(self, config: DartConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.k_proj = nn.Linear(input_size, key_size, bias=False)
        self.v_proj = nn.Linear(input_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.grouped = config.num_attention_heads != config.num_key_value_heads

    def forward(
        self,
        x: Tensor,  # [B, Q, input_size]
        rotation: tuple[Tensor, Tensor],  # cos, sin [B, 1, Q, head_dim]
        mask: Tensor | BlockMask,  # [B or 1, 1, Q, S] bool
        remember: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None,
    ) -> Tensor:  # [B, Q, H]
        split = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (
            project(x).view(split).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotate(query, rotation), _rotate(key, rotation)
        if remember is not None:
            key, value = remember(key, value)
        if isinstance(mask, Tensor):
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=self.grouped)
        else:
            # Under autocast rotation has made these fp32; not every torch casts them back for FlexAttention.
            query, key = query.to(value.dtype), key.to(value.dtype)
            attend = _flex_attention(query.device.type)
            mixed = attend(query, key, value, block_mask=mask, enable_gqa=self.grouped)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class DartMLP(nn.Module):
    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, Q, H] -> [B, Q, H]
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DartLayer(nn.Module):
    """A decoder layer; the first one attends over (embedding, features) pairs of width E + H."""

    def __init__(self, config: DartConfig, index: int) -> None:
        super().__init__()
        first = index == 0
        width = config.embedding_size + config.hidden_size if first else config.hidden_size
        # The first layer's input arrives normalised: its two halves are normed apart (section 3.1).
        self.input_norm = None if first else nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DartAttention(config, width)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DartMLP(config)

    def forward(
        self,
        x: Tensor,  # [B, Q, E + H] for the first layer, else [B, Q, H]
        residual: Tensor,  # [B, Q, H]
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | BlockMask,
        remember: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None,
    ) -> Tensor:  # [B, Q, H]
        if self.input_norm is not None:
            x = self.input_norm(x)
        hidden = residual + self.self_attn(x, rotation, mask, remember)
        return hidden + self.mlp(self.mlp_norm(hidden))


def rotation_at(positions: Tensor, config: DartConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, Q, head_dim] of `positions` [B, Q] (Su et al., arXiv 2104.09864, half-split layout)."""
    frequencies = _frequencies(config.head_dim, config.rope_theta, positions.device)
    angles = positions[:, None, :, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


@lru_cache(maxsize=2)
def _flex_attention(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled it is exact and slow: all scores are written down. On a CPU there is no backward pass.
    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention


@lru_cache(maxsize=16)
def _frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Rotary frequencies [head_dim], each twice."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    return theta ** -torch.cat([exponents, exponents])


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin
