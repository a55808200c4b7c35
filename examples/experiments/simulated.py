"""Models of real shapes without real weights: a target whose text is known, and a head that is right as often as told.

What a round costs depends on shapes alone, and on how many drafts are accepted; so both are built from a config, and
no weights are fetched. The target is a decoder of random weights whose hidden states are nearly its token embeddings,
and whose LM head is its embedding table moved on by one row: the token after t is t + 1, by a margin that no rounding
in any dtype or order reaches. The head runs in full; then it puts the right tokens on top of its distributions, as
many as are to be accepted, and the tree grows from those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.drafters.base import Proposal
from hf_dart.drafters.dart.drafter import DartHead

_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
SHAPES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151936),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151936),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151936),
    "tiny": (64, 96, 2, 4, 2, 16, 512),
}
"""Of Qwen3 (arXiv 2505.09388), by the fields of its config; tiny is for tests."""

_QUIET = 1e-2  # what a layer adds, beside what it would
_SURE = 2.0  # log-odds of a token that the head was given


def build_target(shape: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A target of one of `SHAPES`, in eval mode; the global generators are not moved."""
    fields = dict(zip(_FIELDS, SHAPES[shape], strict=True))
    config = Qwen3Config(
        **fields, tie_word_embeddings=False, pad_token_id=0, bos_token_id=None, eos_token_id=None, rope_theta=1e6
    )
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        target: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        target.get_input_embeddings().weight.normal_()
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(_QUIET)
            layer.mlp.down_proj.weight.mul_(_QUIET)
        target.lm_head.weight.copy_(target.get_input_embeddings().weight.roll(1, 0))
    return target


def forward_bytes(target: Any, batch: int, context: int) -> int:
    """What one forward has to read: all weights but the table of embeddings, and keys and values of the context."""
    weights = sum(weight.nbytes for weight in target.parameters()) - target.get_input_embeddings().weight.nbytes
    config = target.config
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return weights + batch * context * entry * target.dtype.itemsize


class SimulatedHead(DartHead):
    """A head of random weights for `build_target`'s, of whose drafts τ - 1 are accepted on average."""

    def aim(self, tau: float) -> SimulatedHead:
        """Let τ be that: between 1 and the draft length + 1. Rounds that are captured go on with it."""
        whole = int(tau - 1)
        chance = torch.rand(4096, generator=torch.Generator().manual_seed(0))
        right = (whole + (chance < tau - 1 - whole).long()).to(self.device)
        if "_right" in self._buffers:
            self.get_buffer("_right").copy_(right)  # graphs know it by its place
        else:
            self.register_buffer("_right", right)
        return self

    def propose(
        self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None = None
    ) -> Proposal:
        proposal = super().propose(state, features, next_tokens, counts, depth)
        logits, device = proposal.logits, proposal.logits.device
        last = (counts.to(device) - 1).clamp(min=0)[:, None]
        steps = torch.arange(logits.shape[1], device=device)
        tokens = next_tokens.to(device).gather(1, last) + 1 + steps
        right = self.get_buffer("_right")[state.lengths % 4096]
        tokens = torch.where(steps < right[:, None], tokens, tokens + logits.shape[-1] // 2) % logits.shape[-1]
        sure = logits.float().logsumexp(-1, keepdim=True) + _SURE
        return Proposal(logits.scatter(2, tokens[..., None], sure.to(logits.dtype)), proposal.hidden)
