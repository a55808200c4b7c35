"""`EagleDrafter`: an autoregressive head drafts token by token (EAGLE-3, arXiv 2503.01840).

It reads what a DART head reads: the embedding of a token next to fused features of the target in front of it, through
one decoder layer. The target's features end at the last verified position; from there on the layer's own output stands
in for them, and d - 1 further passes follow, each over the best tokens of the pass before (`drafters.beams`). Training
goes the same way, `hf_dart.training.trainers.eagle`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Self

from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.drafters.beams import BeamDrafter, View, last_of
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

    def begin(self, batch_size: int, capacity: int) -> SlotCache:
        return super().begin(batch_size, capacity + self.beam * self.draft_length)

    def read_last(self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor) -> Tensor:
        fused = self.fuse(features.to(device=self.device, dtype=self.dtype))
        view = View.after(state, next_tokens.shape[1])
        read = self._run(state, next_tokens, fused, view, view.positions)
        state.advance(counts)
        return last_of(read, counts)

    def draft_level(self, state: SlotCache, tokens: Tensor, previous: Tensor, level: int, sees: Tensor) -> Tensor:
        # A drafted entry attends to as many positions of the text as its last one.
        return self._run(state, tokens, previous, View.of_level(state, level, sees), state.lengths[:, None] - 1)

    def log_chances(self, states: Tensor) -> Tensor:
        logits = self.logits(self.final(states)).float()
        # Tokens outside the draft vocabulary have almost no probability.
        return spread(logits, self.draft_vocabulary, self.config.vocab_size).log_softmax(-1)

    def _run(self, state: SlotCache, tokens: Tensor, features: Tensor, view: View, asked_from: Tensor) -> Tensor:
        """States [B, Q, H] of tokens [B, Q], whose keys and values are written to the slots of `view`.

        Args:
            features: [B, Q, H] what stands in front of each token.
            asked_from: [B, Q or 1] positions from which windows are counted.
        """
        end = view.seen.shape[-1]
        state.store.reserve(end)
        ages = asked_from[..., None] - view.at[:, None]
        remember = partial(memory, state, slots=view.slots, keys=slice(end))
        rotation = self.rotation(view.positions)
        return self.step(self.embed(tokens), features, rotation, view.seen[:, None], ages[:, None], remember)
