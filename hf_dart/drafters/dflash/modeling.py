"""The network of a DFlash drafter, as both published formats have it: Qwen3's layers over a block and features."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from hf_dart.drafters.dflash.configuration import DFlashConfig, DFlashShape
from hf_dart.drafters.dflash.selectors import BlockConvolution, MarkovSelector, PairSelector
from hf_dart.drafters.layers import DartAttention, KeyValueWriter, rotation_by
from hf_dart.drafters.trained import TrainedDrafter


class DFlashAttention(DartAttention):
    """Attention with the norms of queries and keys that Qwen3 has, which compute in float32."""

    def __init__(self, shape: Qwen3Config) -> None:
        bias = shape.attention_bias
        super().__init__(shape, shape.hidden_size, bias=bias, output_bias=bias)
        self.q_norm = Qwen3RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(shape.head_dim, shape.rms_norm_eps)


class DFlashLayer(nn.Module):
    """A decoder layer as Qwen3's, over a block and the features of the text in front of it."""

    def __init__(self, config: DFlashShape, causal: bool, reach: int | None) -> None:
        super().__init__()
        shape = config.backbone
        self.causal, self.reach, self.reach_of_block = causal, reach, config.reach_of_block
        self.input_layernorm = Qwen3RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = DFlashAttention(shape)
        self.post_attention_layernorm = Qwen3RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Qwen3MLP(shape)
        width, convolution = shape.hidden_size, config.convolution
        self.attention_conv = None if convolution is None else BlockConvolution(width, *convolution)
        self.mlp_conv = None if convolution is None else BlockConvolution(width, *convolution)

    def forward(
        self,
        x: Tensor,  # [B, Q, H]
        rotation: tuple[Tensor, Tensor],
        mask: Tensor,  # [B, 1, Q, S] bool
        remember: KeyValueWriter,
    ) -> Tensor:  # [B, Q, H]
        def attention(normed: Tensor) -> Tensor:
            return self.self_attn(normed, rotation, mask, remember)

        x = x + _convolved(self.attention_conv, attention, self.input_layernorm(x))
        return x + _convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(x))

    def sees(self, queries_at: Tensor, keys_at: Tensor) -> Tensor:
        """[B, Q] and [S] positions to [B, 1, Q, S] bool: the keys up to the block's end that a query attends to."""
        distance = queries_at[..., None] - keys_at
        mask = keys_at <= queries_at[:, -1:, None]
        if self.causal:
            mask = mask & (distance >= 0)
        if self.reach is not None and self.reach_of_block:
            mask = mask & (queries_at[:, :1, None] - keys_at <= self.reach)
        elif self.reach is not None:
            mask = mask & (distance.abs() <= self.reach)
        return mask.expand(distance.shape)[:, None]


def _convolved(convolution: BlockConvolution | None, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a part of a layer over x [B, Q, H], between the convolutions of the block if there are any."""
    if convolution is None:
        return part(x)
    x, given = convolution.before(x)
    return convolution.after(part(x), given)


class DFlashModel(TrainedDrafter):
    """The modules of a [`DFlashDrafter`].

    Attributes:
        shape: what the published config.json says.
    """

    reads_rows = True

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.shape = DFlashShape.read(config.published)
        given, shape = self.shape, self.shape.backbone
        self.fc = nn.Linear(len(given.feature_layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(given, *attending) for attending in given.layers)
        self.norm = Qwen3RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        scored = given.draft_vocab_size
        self.lm_head = None if scored is None else nn.Linear(shape.hidden_size, scored, bias=False)
        self.selector = None if given.selector is None else _selector(given, *given.selector)
        # No buffer: a change of dtype must not round them.
        with torch.device("cpu"):
            rotary = Qwen3RotaryEmbedding(shape)
        self._frequencies, self._rotation_scale = torch.cat([rotary.inv_freq] * 2), rotary.attention_scaling
        self.post_init()

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin [B, 1, Q, head_dim] of positions [B, Q]."""
        frequencies = self._frequencies.to(positions.device)
        return rotation_by(frequencies, self._rotation_scale, positions, self.fc.weight.dtype)

    @property
    def stack(self) -> list[DFlashLayer]:
        """The decoder layers."""
        return cast("list[DFlashLayer]", list(self.layers))


def _selector(config: DFlashShape, kind: str, rank: int) -> PairSelector | MarkovSelector:
    vocabulary = config.vocab_size
    assert vocabulary is not None  # the formats that have selectors say it
    scored = config.draft_vocab_size or vocabulary
    if kind == "pairs":
        return PairSelector(config.hidden_size, vocabulary, scored, rank)
    return MarkovSelector(config.hidden_size, vocabulary, scored, rank, gated=kind == "gated")
