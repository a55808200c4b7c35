"""`EagleDrafter`: an autoregressive head drafts token by token (EAGLE-3, arXiv 2503.01840).

It reads what a DART head reads: the embedding of a token next to fused features of the target in front of it, through
one decoder layer. The target's features end at the last verified position; from there on the layer's own output stands
in for them, and d - 1 further passes follow, each over the best tokens of the pass before (`drafters.beams`). Training
goes the same way, `hf_dart.training.trainers.eagle`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hf_dart.cache.slots import SlotSpec
from hf_dart.drafters.beams import BeamDrafter
from hf_dart.drafters.eagle.configuration import EagleConfig
from hf_dart.drafters.eagle.modeling import EagleModel
from hf_dart.drafters.layers import KeyValueWriter, rotation_at
from hf_dart.drafters.pretrained import PretrainedDrafter
from hf_dart.drafters.registry import register
from hf_dart.drafters.state import SlotState
from hf_dart.hub.kinds import CardTexts, bibtex, describe_features, describe_layers


def _rows(config: EagleConfig) -> dict[str, str]:
    """What a config says, for the table of a card."""
    beam = "" if config.beam == 1 else f", the {config.beam} best of each depth drafted on from"
    return {
        "layers": describe_layers(config, 1),
        "reads": describe_features(config),
        "drafts": f"{config.draft_length} tokens, one pass each{beam}",
    }


_CARD = CardTexts(
    "an EAGLE head",
    "head",
    "eagle",
    "An autoregressive draft head ([EAGLE-3](https://arxiv.org/abs/2503.01840))",
    _rows,
    bibtex(
        "eagle2025",
        "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
        2025,
        "2503.01840",
    ),
)


@register(
    "eagle",
    config=EagleConfig,
    trainer="hf_dart.training.trainers.eagle:EagleTrainer",
    card=_CARD,
)
class EagleDrafter(BeamDrafter[SlotState], PretrainedDrafter, EagleModel):
    """An autoregressive draft head, as `assistant=`.

    Attributes:
        beam: W, as in the config.
    """

    config: EagleConfig
    described_as: ClassVar[str] = "EAGLE head"

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.beam = config.beam

    def passes(self, depth: int) -> int:
        return depth

    # ---- drafting -----------------------------------------------------------------------------------

    @property
    def slot_spec(self) -> SlotSpec:
        return SlotSpec(self.config.num_key_value_heads, self.config.head_dim, self.dtype, self.device)

    def begin(self, batch_size: int, capacity: int) -> SlotState:
        return SlotState.begin(self.slot_spec, 2, batch_size, capacity + self.beam * self.config.draft_length)

    def extend(self, state: SlotState, features: Tensor, next_tokens: Tensor, counts: Tensor) -> None:
        self._read(state, features, next_tokens)
        state.advance(counts)

    def read_last(self, state: SlotState, features: Tensor, next_tokens: Tensor, counts: Tensor) -> Tensor:
        read = self._read(state, features, next_tokens)
        state.advance(counts)
        ends = (counts - 1).clamp(min=0).to(read.device)[:, None, None].expand(-1, 1, read.shape[-1])
        return read.gather(1, ends)

    def draft_level(self, state: SlotState, tokens: Tensor, previous: Tensor, level: int, sees: Tensor) -> Tensor:
        return self._draft(state, self.embed(tokens), previous, level, sees)

    def log_chances(self, states: Tensor) -> Tensor:
        return self.logits(self.norm(states)).float().log_softmax(-1)

    def _read(self, state: SlotState, features: Tensor, next_tokens: Tensor) -> Tensor:
        """States [B, A, H] of verified positions, whose keys and values are written after those of `state`."""
        fused = self.fc(features.to(device=self.device, dtype=self.dtype))
        entries = torch.arange(next_tokens.shape[1], device=self.device)
        positions = state.lengths[:, None] + entries
        end = state.longest + len(entries)
        state.store.reserve(end)
        mask = torch.arange(end, device=self.device) <= positions[..., None]
        remember = _writer(state, positions, end)
        rotation = rotation_at(positions, self.config, self.dtype)
        return self.step(self.embed(next_tokens), fused, rotation, mask[:, None], remember)

    def _draft(self, state: SlotState, embeddings: Tensor, previous: Tensor, level: int, sees: Tensor) -> Tensor:
        """One pass over W drafted tokens of depth `level`: states [B, W, H].

        Args:
            embeddings: [B, W, E].
            previous: [B, W, H] the states that drafted them.
            sees: [B, W, level W] which entries of this draft lie on the path to each, itself included.
        """
        width, entries = sees.shape[1:]
        slots = state.lengths[:, None] + torch.arange(entries, device=self.device)
        end = state.longest + entries
        state.store.reserve(end)
        mask = (torch.arange(end, device=self.device) < state.lengths[:, None])[:, None].repeat(1, width, 1)
        mask.scatter_(2, slots[:, None].expand(-1, width, -1), sees)
        positions = (state.lengths + level - 1)[:, None].expand(-1, width)
        rotation = rotation_at(positions, self.config, self.dtype)
        return self.step(embeddings, previous, rotation, mask[:, None], _writer(state, slots[:, -width:], end))


def _writer(state: SlotState, slots: Tensor, end: int) -> KeyValueWriter:
    """Keeps keys and values in `slots` [B, Q] and returns those of slots 0..end - 1."""

    def remember(key: Tensor, value: Tensor, injected: bool = False) -> tuple[Tensor, Tensor]:
        keys, values = state.store.write(0, key, slots), state.store.write(1, value, slots)
        return keys[:, :, :end], values[:, :, :end]

    return remember
