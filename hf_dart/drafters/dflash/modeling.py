"""Layers of a DFlash drafter, Qwen3's over a block and features, and selectors of its variants.

A block's logits know each position, not each other. DFlash2 scores a token after another by the hidden state between
them; DSpark (arXiv 2607.05147) by one low-rank matrix, which the hidden state may gate. Domino (arXiv 2605.29707) and
DSpark's recurrent form score a token by all tokens of the block in front of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from hf_dart.drafters.layers import DartAttention, KeyValueWriter
from hf_dart.interop.dflash import DFlashShape


class DFlashLayer(nn.Module):
    """A decoder layer as Qwen3's, over a block and the features of the text in front of it."""

    def __init__(self, config: DFlashShape, causal: bool, reach: int | None) -> None:
        super().__init__()
        shape, bias = config.backbone, config.backbone.attention_bias
        self.causal, self.reach, self.reach_of_block = causal, reach, config.reach_of_block
        self.input_layernorm = Qwen3RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = DartAttention(shape, shape.hidden_size, bias=bias, output_bias=bias)
        # Those of Qwen3 compute in float32.
        self.self_attn.q_norm = Qwen3RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.self_attn.k_norm = Qwen3RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Qwen3MLP(shape)
        width, convolution = shape.hidden_size, config.convolution
        self.attention_conv = None if convolution is None else BlockConvolution(width, *convolution)
        self.mlp_conv = None if convolution is None else BlockConvolution(width, *convolution)

    def forward(
        self,
        x: Tensor,  # [B, Q, H]
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None,  # [B, 1, Q, S] bool; None: every key is seen
        remember: KeyValueWriter,
        known: Tensor | None = None,  # [B, A, H] features in front of the block, which have no keys and values yet
    ) -> Tensor:  # [B, Q, H]
        def attention(normed: Tensor) -> Tensor:
            if known is None:
                return self.self_attn(normed, rotation, mask, remember)
            both = torch.cat([known, normed], dim=1)
            return self.self_attn(both, rotation, mask, remember, slice(known.shape[1], None))

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


class BlockConvolution(nn.Module):
    """A causal convolution in front of a part of a layer and one after it, which read the block alone.

    Kernels are those learned per channel plus ones that the input gives per group of channels.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps, self.group_size = taps, group_size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * (hidden_size // group_size), bias=False)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first convolution of x [B, Q, H], and the kernels [B, Q, k, G] that x gives for the second."""
        given = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        return self._convolve(x, given[..., 0, :, :], self.base_kernel[0]), given[..., 1, :, :]

    def after(self, x: Tensor, given: Tensor) -> Tensor:
        """Return the second convolution, of the layer part's output [B, Q, H]."""
        return self._convolve(x, given, self.base_kernel[1])

    def _convolve(self, x: Tensor, given: Tensor, base: Tensor) -> Tensor:
        kernels = base + given.repeat_interleave(self.group_size, dim=-1)  # [B, Q, k, H]
        out = x * kernels[:, :, 0]
        for tap in range(1, self.taps):
            out = out + F.pad(x, (0, 0, tap, 0))[:, : x.shape[1]] * kernels[:, :, tap]
        return out


class PairSelector(nn.Module):
    """DFlash2's: <P h * phi(a), psi(b)> for token b after token a, h being the hidden state that drafts b."""

    def __init__(self, hidden_size: int, vocab_size: int, scored: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(scored, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, hidden: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """Scores [B, d, J, K] to be added to logits.

        Hidden states are [B, d, H], tokens in front [B, d, J], candidates [B, d, K] columns of the draft vocabulary.
        """
        context = self.hidden_projection(hidden)[:, :, None] * self.predecessor_codebook[previous]
        return context @ self.successor_codebook[candidates].transpose(-1, -2)


class MarkovSelector(nn.Module):
    """DSpark's: <phi(a), psi(b)>, phi(a) gated by the hidden state that drafts b or not."""

    def __init__(self, hidden_size: int, vocab_size: int, scored: int, rank: int, gated: bool) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, scored, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if gated else None

    def forward(self, hidden: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """Scores [B, d, J, K]; shapes as for `PairSelector`."""
        phi = self.markov_w1(previous)
        if self.gate_proj is not None:
            wide = hidden[:, :, None].expand(-1, -1, phi.shape[2], -1)
            phi = phi * torch.sigmoid(self.gate_proj(torch.cat([wide, phi], dim=-1)))
        return phi @ self.markov_w2.weight[candidates].transpose(-1, -2)


class PathSelector(nn.Module):
    """What a block's tokens add to the logits of the next one, by states [B, W, S] that have read them in order."""

    size: int
    """S."""

    def read(self, states: Tensor, tokens: Tensor, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Return states after tokens [B, W] with embeddings [B, W, H]; hidden states [B, W, H] draft the next ones."""
        raise NotImplementedError

    def added(self, states: Tensor, hidden: Tensor, place: int) -> Tensor | float:
        """Return what is added to the logits [B, W, M] of the draft's token `place`, from 0."""
        raise NotImplementedError


class DominoSelector(PathSelector):
    """Domino's: two layers over the state of a GRU, which reads embeddings, and the hidden state."""

    def __init__(self, hidden_size: int, vocab_size: int, scored: int, size: int, rank: int, first: int) -> None:
        super().__init__()
        self.size, self.first = size, first  # the first tokens' logits stay as they are
        shapes = {"weight_ih_l0": (3 * size, hidden_size), "weight_hh_l0": (3 * size, size)}  # as `nn.GRU` has them
        self.prefix_gru = nn.ParameterDict({name: nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()})
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + size, rank, bias=False), nn.SiLU(), nn.Linear(rank, scored, bias=False)
        )

    def read(self, states: Tensor, tokens: Tensor, embeddings: Tensor, hidden: Tensor) -> Tensor:
        weights = [self.prefix_gru[name] for name in ("weight_ih_l0", "weight_hh_l0")]
        return torch.gru_cell(embeddings.flatten(0, 1), states.flatten(0, 1), *weights).view_as(states)

    def added(self, states: Tensor, hidden: Tensor, place: int) -> Tensor | float:
        return 0.0 if place < self.first else self.embed_proj(torch.cat([hidden, states], dim=-1))


class RecurrentMarkovSelector(PathSelector):
    """DSpark's recurrent form: a gated state, and an output [B, W, r] beside it that is scored as phi(a) is."""

    def __init__(self, hidden_size: int, vocab_size: int, scored: int, rank: int) -> None:
        super().__init__()
        self.size = 2 * rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, scored, bias=False)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def read(self, states: Tensor, tokens: Tensor, embeddings: Tensor, hidden: Tensor) -> Tensor:
        state = states.chunk(2, dim=-1)[0]
        known = torch.cat([state, self.markov_w1(tokens), hidden], dim=-1)
        gate, new, output = self.joint_proj(known).chunk(3, dim=-1)
        return torch.cat([torch.lerp(new.tanh(), state, gate.sigmoid()), output], dim=-1)

    def added(self, states: Tensor, hidden: Tensor, place: int) -> Tensor | float:
        return self.markov_w2(states.chunk(2, dim=-1)[1].tanh())


SELECTORS: dict[str, Callable[..., PairSelector | MarkovSelector | PathSelector]] = {
    "pairs": PairSelector, "markov": MarkovSelector, "rnn": RecurrentMarkovSelector, "domino": DominoSelector,
}  # fmt: skip
"""Classes by `DFlashShape.selector`."""
