"""`EagleDrafter`: an autoregressive head drafts token by token (EAGLE-3, arXiv 2503.01840).

It reads what a DART head reads: the embedding of a token next to fused features of the target in front of it, through
one decoder layer. The target's features end at the last verified position; from there on the layer's own output stands
in for them, and d - 1 further passes follow, each over the best tokens of the pass before (`drafters.beams`). Training
goes the same way, `hf_dart.training.trainers.eagle`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.drafters.base_config import HeadConfig
from hf_dart.drafters.beams import BeamDrafter, View
from hf_dart.drafters.dart.configuration import DartConfig
from hf_dart.drafters.layers import DartLayer, KeyValueWriter, fuse, fusion_norm, memory, take
from hf_dart.drafters.published import eagle_layers, load_published
from hf_dart.drafters.registry import register
from hf_dart.drafters.trained import TrainedDrafter
from hf_dart.errors import check_fields
from hf_dart.hub import card_texts
from hf_dart.interop.eagle3 import eagle1_format, eagle3_format, is_peagle
from hf_dart.trees.vocabulary import spread


class EagleConfig(HeadConfig):
    """The shape of an [`EagleDrafter`]: decoder layers over a token and fused features.

    Args:
        draft_length: d, passes of the layers per draft.
        beam: W, how many different tokens of each depth are drafted on from; 1 drafts a chain. What `drafter.beam`
            starts as.
        num_layers: decoder layers; the first one attends over the pair of both, the others over its output.
        joined: the fusion takes a token's embedding together with the feature, instead of features of several layers;
            there are no norms in front of the first layer or after the last one (EAGLE-1 and EAGLE-2).
        norm_output: what stands in for the next feature is the output after the final norm, not before it (EAGLE-3.1).
        windows: as for all heads; a drafted entry attends to as many positions of the text as its last one.

    The other fields are those of `hf_dart.drafters.base_config.HeadConfig`.
    """

    model_type = "dart_eagle"
    changeable = (*HeadConfig.changeable, "beam")

    most_layers = 8

    beam: int = 4
    joined: bool = False
    norm_output: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        check_fields(self, least={"beam": 1})
        normed = self.fusion_norm != "none" or self.norm_before_residual or self.norm_output
        if self.joined and (normed or self.features_width != self.hidden_size):
            raise ValueError(
                "joined reads one layer of the target, of the width hidden_size, and has no norms; leave out "
                "fusion_norm, norm_before_residual and norm_output, and name one layer in feature_layers."
            )


# Earlier versions wrote the fields of DART heads into config.json too, as DART heads have them by default.
_OWN = {one.name for one in fields(EagleConfig)}
_OTHERS = {one.name: one.default for one in fields(DartConfig) if one.name not in _OWN}
EagleConfig.former_fields = DartConfig.former_fields | _OTHERS


Memory = Callable[[int], KeyValueWriter]
"""Function from a layer's number to the function that keeps its keys and values."""


@register(
    "eagle",
    config=EagleConfig,
    trainer="hf_dart.training.trainers.eagle:EagleTrainer",
    card=card_texts.EAGLE,
    # P-EAGLE heads draft in one pass, as DART heads do.
    reads=lambda content, names: (
        None if is_peagle(content) else eagle3_format(content) or eagle1_format(content, names)
    ),
)
class EagleDrafter(BeamDrafter[SlotCache], TrainedDrafter):
    """An autoregressive draft head (EAGLE-3, arXiv 2503.01840), as `assistant=`.

    `EagleDrafter.from_target(model)` makes an untrained head; `EagleDrafter.from_pretrained(path, target=model)` loads
    a trained one, also in the formats of EAGLE-1, EAGLE-2 and EAGLE-3 (`hf_dart.interop.eagle3`).

    Attributes:
        beam: W, number of different tokens per depth from which drafting continues (initially the config's); 1 drafts
            a chain.
    """

    config: EagleConfig
    described_as: ClassVar[str] = "EAGLE head"

    main_input_name = "features"
    _no_split_modules = ["DartLayer"]  # noqa: RUF012

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        plain = not config.joined
        self.fusion_norm = fusion_norm(config)
        fused = config.features_width if plain else config.embedding_size + hidden
        self.fc = nn.Linear(fused, hidden, bias=config.fusion_bias)
        self.embedding_norm = nn.RMSNorm(config.embedding_size, eps) if plain else None
        self.feature_norm = nn.RMSNorm(hidden, eps) if plain else None
        self.layer = DartLayer(config, pairs=plain, normed=False)
        deeper = range(config.num_layers - 1)
        self.deeper = nn.ModuleList(DartLayer(config, pairs=False, normed=True) for _ in deeper)
        self.norm = nn.RMSNorm(hidden, eps) if plain else None
        self.make_tables(config)
        self.beam = config.beam
        self.post_init()

    @classmethod
    def _of_published(cls, *found: Any, **where: Any) -> Self:
        return load_published(cls, *found, layers=eagle_layers, **where)

    # ---- the network -----------------------------------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden states of the target [..., F] to features [..., H]; as they are where `fc` takes tokens too."""
        return features if self.config.joined else fuse(features, self.fusion_norm, self.fc)

    def step(
        self,
        embeddings: Tensor,  # [B, Q, E]
        features: Tensor,  # [B, Q, H] what stands in front of each token
        rotation: tuple[Tensor, Tensor],
        mask: Tensor,  # [B, 1, Q, S] bool
        asked_from: Tensor,  # [B, 1, Q, 1] positions of the text from which windows are counted
        at: Tensor,  # [B, 1, 1, S] positions of keys; those of drafted ones come after all of these
        memory: Memory,
        wanted: Tensor | None = None,  # [B, W] entries whose states are wanted; None is all
    ) -> Tensor:
        """Run the layers over tokens and features: states [B, Q or W, H], which stand in for the next features."""
        if self.embedding_norm is None or self.feature_norm is None:
            pairs = residual = self.fc(torch.cat([embeddings, features], dim=-1))
        else:
            known = self.feature_norm(features)
            pairs = torch.cat([self.embedding_norm(embeddings), known], dim=-1)
            residual = known if self.config.norm_before_residual else features
        masks = [mask & (at > asked_from - window) if window else mask for window in self.config.windows or [0]]
        x = pairs
        for number, layer in enumerate((self.layer, *self.deeper)):
            asked = wanted if number == len(self.deeper) else None
            seen = take(masks[number % len(masks)][:, 0], asked)[:, None]
            x = residual = layer(x, residual, rotation, seen, memory(number), asked)
        return self.norm(x) if self.norm is not None and self.config.norm_output else x

    def final(self, states: Tensor) -> Tensor:
        """States [..., H] of `step` as the LM head takes them."""
        return states if self.norm is None or self.config.norm_output else self.norm(states)

    def forward(
        self,
        features: Tensor,  # [B, T, F]
        next_embeddings: Tensor,  # [B, T, E]
        drafted_embeddings: Tensor,  # [B, K, d - 1, E] of the true tokens after each anchor
        anchors: Tensor,  # [B, K] of 0..T-1; what is below 0 is no block
        positions: Tensor,  # [B, T + K (d - 1)]
        attention_mask: Tensor,  # [B, 1, T + K (d - 1), T + K (d - 1)] bool
    ) -> Tensor:
        """Run the training pass: d - 1 passes after every anchor, each over the states of the one before.

        That is the training-time test of EAGLE-3 (section 3.2): tokens are the true ones, features its own.

        Returns:
            [B, K, d, H] normed states, the first of each block that of its anchor.
        """
        real = features.shape[1]
        count, steps = drafted_embeddings.shape[1:3]
        rotation = self.rotation(positions)
        keys: list[list[Tensor]] = [[] for _ in range(self.config.num_layers)]
        values: list[list[Tensor]] = [[] for _ in range(self.config.num_layers)]

        def memory(number: int) -> KeyValueWriter:
            def remember(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
                keys[number].append(key)
                values[number].append(value)
                return torch.cat(keys[number], dim=2), torch.cat(values[number], dim=2)

            return remember

        known = (rotation[0][:, :, :real], rotation[1][:, :, :real])
        place = torch.arange(real, device=features.device)
        text = attention_mask[:, :, :real, :real]
        last = self.step(
            next_embeddings, self.fuse(features), known, text, place[:, None], place, memory, anchors.clamp(min=0)
        )
        places = [part[:, :, real:].unflatten(2, (count, steps)) for part in rotation]
        sees = attention_mask[:, :, real:].unflatten(2, (count, steps))  # [B, 1, K, d - 1, T + K (d - 1)]
        asked_from, key_at = anchors[:, None, :, None], F.pad(place, (0, count * steps), value=real)
        drafted = [last]
        for step in range(steps):
            mask = sees[:, :, :, step]
            # Keys lie pass by pass, those of `attention_mask` block by block.
            own = mask[..., real:].unflatten(-1, (count, steps)).transpose(-1, -2)[..., : step + 1, :].flatten(-2)
            at = (places[0][:, :, :, step], places[1][:, :, :, step])
            mask = torch.cat([mask[..., :real], own], dim=-1)
            last = self.step(
                drafted_embeddings[:, :, step], last, at, mask, asked_from, key_at[: mask.shape[-1]], memory
            )
            drafted.append(last)
        return self.final(torch.stack(drafted, dim=2))

    # ---- drafting -----------------------------------------------------------------------------------

    @property
    def drafted_entries(self) -> int:
        return (self.beam + 1) * self.draft_length

    def read_last(self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor) -> Tensor:
        fused = self.fuse(features.to(device=self.device, dtype=self.dtype))
        view = View.after(state, next_tokens.shape[1])
        last = (counts.to(self.device) - 1).clamp(min=0)[:, None]
        read = self._run(state, next_tokens, fused, view, view.positions, last)
        state.advance(counts)
        return read

    def draft_level(self, state: SlotCache, tokens: Tensor, previous: Tensor, level: int, sees: Tensor) -> Tensor:
        # A drafted entry attends to as many positions of the text as its last one.
        return self._run(state, tokens, previous, View.of_level(state, level, sees), state.lengths[:, None] - 1)

    def log_chances(self, states: Tensor) -> Tensor:
        logits = self.logits(self.final(states)).float()
        # Tokens outside the draft vocabulary, or the head's own table, have almost no probability.
        rows = getattr(self.shared.lm_head, "out_features", self.config.vocab_size)
        return spread(logits, self.draft_vocabulary, rows).log_softmax(-1)

    def _run(
        self,
        state: SlotCache,
        tokens: Tensor,
        features: Tensor,
        view: View,
        asked_from: Tensor,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """States [B, Q, H] of tokens [B, Q] after `features` [B, Q, H], whose keys and values are written to slots.

        Windows are counted from `asked_from` [B, Q or 1]. Only states of the entries `wanted` [B, W] are computed.
        """
        end = view.seen.shape[-1]
        state.store.reserve(end)
        remember = partial(memory, state, slots=view.slots, keys=slice(end))
        rotation = self.rotation(view.positions)
        places = asked_from[:, None, :, None], view.at[:, None, None]
        return self.step(self.embed(tokens), features, rotation, view.seen[:, None], *places, remember, wanted)
