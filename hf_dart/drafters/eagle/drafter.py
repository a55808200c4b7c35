"""`EagleDrafter`: an autoregressive head drafts token by token (EAGLE-3, arXiv 2503.01840).

It reads what a DART head reads: the embedding of a token next to fused features of the target in front of it, through
one decoder layer. The target's features end at the last verified position; from there on the layer's own output stands
in for them, and d - 1 further passes follow, each over the best tokens of the pass before (`drafters.beams`). Training
goes the same way, `hf_dart.training.trainers.eagle`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.cache.slots import SlotSpec
from hf_dart.drafters.base import Verified
from hf_dart.drafters.beams import BeamDrafter
from hf_dart.drafters.eagle.configuration import EagleConfig
from hf_dart.drafters.eagle.modeling import EagleModel
from hf_dart.drafters.layers import memory
from hf_dart.drafters.published import eagle_layers, load_published
from hf_dart.drafters.registry import register
from hf_dart.hub import card_texts
from hf_dart.hub.download import HUB_OPTIONS, tensor_names
from hf_dart.interop.eagle3 import eagle1_format, eagle3_format, is_peagle
from hf_dart.trees.vocabulary import spread


def _reads(content: dict[str, Any]) -> str | None:
    """P-EAGLE heads draft in one pass, as DART heads do."""
    return None if is_peagle(content) else eagle3_format(content)


@register(
    "eagle",
    config=EagleConfig,
    trainer="hf_dart.training.trainers.eagle:EagleTrainer",
    card=card_texts.EAGLE,
    reads=_reads,
    reads_named=eagle1_format,
)
class EagleDrafter(BeamDrafter[SlotCache], EagleModel):
    """An autoregressive draft head (EAGLE-3, arXiv 2503.01840), as `assistant=`.

    `EagleDrafter.from_target(model)` makes an untrained head; `EagleDrafter.from_pretrained(path, target=model)` loads
    a trained one, also in the formats of EAGLE-1, EAGLE-2 and EAGLE-3 (`hf_dart.interop.eagle3`).

    Attributes:
        beam: W, number of different tokens per depth from which drafting continues (initially the config's); 1 drafts
            a chain.
    """

    config: EagleConfig
    described_as: ClassVar[str] = "EAGLE head"

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.beam = config.beam

    @classmethod
    def _from_published(
        cls, path: str, content: dict[str, Any], target: PreTrainedModel | None, tokenizer: Any, **kwargs: Any
    ) -> Self:
        """Load an EAGLE head of another project (`hf_dart.interop.eagle3`)."""
        place = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        if _reads(content) is None and eagle1_format(content, partial(tensor_names, path, **place)) is None:
            return super()._from_published(path, content, target, tokenizer, **kwargs)
        return load_published(cls, path, target, tokenizer, layers=eagle_layers, **kwargs)

    def passes(self, depth: int) -> int:
        return depth

    # ---- drafting -----------------------------------------------------------------------------------

    @property
    def slot_spec(self) -> SlotSpec:
        return SlotSpec(self.config.num_key_value_heads, self.config.head_dim, self.dtype, self.device)

    def begin(self, batch_size: int, capacity: int) -> SlotCache:
        drafted = self.beam * self.config.draft_length
        return SlotCache.begin(self.slot_spec, 2 * self.config.num_layers, batch_size, capacity + drafted)

    def extend(self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor) -> None:
        for part in Verified(features, next_tokens, counts).parts():
            self._read(state, part.features, part.next_tokens)
            state.advance(part.counts)

    def read_last(self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor) -> Tensor:
        read = self._read(state, features, next_tokens)
        state.advance(counts)
        ends = (counts - 1).clamp(min=0).to(read.device)[:, None, None].expand(-1, 1, read.shape[-1])
        return read.gather(1, ends)

    def draft_level(self, state: SlotCache, tokens: Tensor, previous: Tensor, level: int, sees: Tensor) -> Tensor:
        width, entries = sees.shape[1:]
        slots = state.lengths[:, None] + torch.arange(entries, device=self.device)
        end = state.longest + entries
        state.store.reserve(end)
        ages = (state.lengths[:, None] - 1 - torch.arange(end, device=self.device))[:, None]  # [B, 1, end]
        mask = (ages >= 0).repeat(1, width, 1)
        mask.scatter_(2, slots[:, None].expand(-1, width, -1), sees)
        positions = (state.lengths + level - 1)[:, None].expand(-1, width)
        remember = partial(memory, state, slots=slots[:, -width:], keys=slice(end))
        embeddings, rotation = self.embed(tokens), self.rotation(positions)
        return self.step(embeddings, previous, rotation, mask[:, None], ages[:, None], remember)

    def log_chances(self, states: Tensor) -> Tensor:
        logits = self.logits(self.final(states)).float()
        # Tokens outside the draft vocabulary have almost no probability.
        return spread(logits, self.draft_vocabulary, self.config.vocab_size).log_softmax(-1)

    def _read(self, state: SlotCache, features: Tensor, next_tokens: Tensor) -> Tensor:
        """States [B, A, H] of verified positions, whose keys and values are written after those of `state`."""
        fused = self.fuse(features.to(device=self.device, dtype=self.dtype))
        entries = torch.arange(next_tokens.shape[1], device=self.device)
        positions = state.lengths[:, None] + entries
        end = state.longest + len(entries)
        state.store.reserve(end)
        ages = (positions[..., None] - torch.arange(end, device=self.device))[:, None]
        remember = partial(memory, state, slots=positions, keys=slice(end))
        return self.step(self.embed(next_tokens), fused, self.rotation(positions), ages >= 0, ages, remember)
