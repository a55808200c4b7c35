"""The network of a draft head: target features and next-token embeddings in, d token distributions out, in one pass.

The architecture is that of DART (arXiv 2601.19278, section 3.1): position i carries the fused features of
the target at i and the embedding of token i + 1; d - 1 mask slots follow the last real position; logits are
shifted, so that the last real position predicts the first draft token and mask slot j the token j + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_dart.drafters.dart.configuration import DartConfig
from hf_dart.drafters.dart.editor import Editor
from hf_dart.drafters.dart.selector import BigramSelector
from hf_dart.drafters.layers import DartLayer, fuse, fusion_norm, rotation_at
from hf_dart.drafters.trained import TrainedDrafter
from hf_dart.models.devices import device_of


class Entries(NamedTuple):
    """Inputs of the first layer.

    Attributes:
        x: [B, Q, E + H] what attention looks at: normed embeddings and normed features; in the "stream" form the
            residual itself.
        residual: [B, Q, H].
        context: [B, R, H] fused features of the first R entries, the real ones, which every layer injects; None for
            heads that do not.
    """

    x: Tensor
    residual: Tensor
    context: Tensor | None

    def followed_by(self, slots: Entries) -> Entries:
        """Return these entries, followed by those of mask slots."""
        return Entries(
            torch.cat([self.x, slots.x], dim=1), torch.cat([self.residual, slots.residual], dim=1), self.context
        )


class Edits(NamedTuple):
    """The edit pass of `DartModel.forward`.

    Attributes:
        mask: [B, 1, M, T + M] what the slots attend to; T more keys if features are injected.
        draft: the tokens [B, M] that the slots hold, from the states [B, T + M, H] of the first pass; -1 for slots
            that stay masked.
    """

    mask: Tensor
    draft: Callable[[Tensor], Tensor]


class DartModel(TrainedDrafter):
    """The network of a [`DartHead`]: its modules, and the pass that training runs."""

    config_class = DartConfig
    config: DartConfig
    described_as = "DART head"
    base_model_prefix = "dart"
    main_input_name = "features"
    _no_split_modules = ["DartLayer"]  # noqa: RUF012

    def __init__(self, config: DartConfig) -> None:
        super().__init__(config)
        self.fusion_norm = fusion_norm(config)
        self.fc = nn.Linear(config.features_width, config.hidden_size, bias=config.fusion_bias)
        self.embedding_norm = nn.RMSNorm(config.embedding_size, config.rms_norm_eps)
        pairs = config.input_form == "pair"
        self.embedding_projection = None if pairs else nn.Linear(config.embedding_size, config.hidden_size, bias=False)
        if pairs or config.inject_features:
            self.feature_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        slot_width = config.embedding_size + config.hidden_size if pairs else config.hidden_size
        if config.mask_mode == "peagle":
            slot_width = config.features_width
        # An Embedding, not a Parameter: PEFT's modules_to_save trains and saves modules only.
        self.mask_slot = nn.Embedding(1, slot_width)
        parts = {
            "injected": config.inject_features,
            "bias": config.attention_bias,
            "output_bias": config.output_bias,
            "qk_norm": config.qk_norm,
            "mlp_bias": config.mlp_bias,
        }
        first = [pairs and index == 0 for index in range(config.num_layers)]
        self.layers = nn.ModuleList(DartLayer(config, pairs=one, normed=not one, **parts) for one in first)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.make_tables(config)
        self.selector = BigramSelector(config) if config.selector_rank else None
        self.editor = Editor(config) if config.editor else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, BigramSelector):
            module.start_neutral()
        elif isinstance(module, Editor):
            nn.init.zeros_(module.correction.weight)
        else:
            super()._init_weights(module)

    # ---- the pass -----------------------------------------------------------------------------------

    def inputs(self, features: Tensor, embeddings: Tensor) -> Entries:
        """Return the first layer's entries of real positions: both halves of a pair normed, the residual not.

        Args:
            features: [B, T, F] of positions i.
            embeddings: [B, T, E] of the tokens at i + 1.
        """
        return self._entries(fuse(features, self.fusion_norm, self.fc), self.embedding_norm(embeddings))

    def _entries(self, fused: Tensor, token: Tensor) -> Entries:
        """Make entries of fused features [B, T, H] and normed embeddings [B, T, E]."""
        known = self.feature_norm(fused) if self.config.input_form == "pair" or self.config.inject_features else None
        context = known if self.config.inject_features else None
        if self.embedding_projection is not None:
            stream = fused + self.embedding_projection(token)
            return Entries(stream, stream, context)
        assert known is not None
        residual = known if self.config.norm_before_residual else fused
        return Entries(torch.cat([token, known], dim=-1), residual, context)

    def slot_inputs(self, batch: int, count: int) -> Entries:
        """Return the entries of mask slots, which are all alike: [B, count, ...].

        A learned slot is one vector, the first H of which are the residual.
        """
        learned = self.mask_slot.weight[None]
        if self.config.mask_mode == "peagle":
            # Filled in place: a CUDA graph takes no number from the host.
            where = device_of(self.shared.embeddings)
            assert self.config.mask_token_id is not None
            token = torch.full((1, 1), self.config.mask_token_id, dtype=torch.long, device=where)
            slot = self.inputs(learned, self.embed(token))
        else:
            slot = Entries(learned, learned[..., : self.config.hidden_size], None)
        return Entries(slot.x.expand(batch, count, -1), slot.residual.expand(batch, count, -1), None)

    def edit_inputs(self, tokens: Tensor, hidden: Tensor) -> Entries:
        """Return the entries of slots that hold a draft (`hf_dart.drafters.dart.editor.Editor`).

        Args:
            tokens: [B, M] draft token j of mask slot j; where it is -1, the slot stays a mask slot.
            hidden: [B, M, H] of the first pass at these slots.
        """
        assert self.editor is not None
        slots = self.slot_inputs(*tokens.shape)
        token = self.embedding_norm(self.embed(tokens.clamp(min=0)))
        edited = self._entries(self.editor.features(token, hidden), token)
        held = (tokens >= 0).to(edited.x.device)[..., None]
        x, residual = torch.where(held, edited.x, slots.x), torch.where(held, edited.residual, slots.residual)
        # Features are injected at real positions only: there are none here.
        return Entries(x, residual, None if edited.context is None else edited.context[:, :0])

    def forward(
        self,
        features: Tensor,  # [B, T, F]
        next_embeddings: Tensor,  # [B, T, E]
        positions: Tensor,  # [B, T + M]
        attention_mask: Tensor | None,  # [B, 1, T + M, T + M] bool; T more keys if features are injected
        edits: Edits | None = None,
        wanted: Tensor | None = None,  # [B, W] entries
        wanted_mask: Tensor | None = None,  # [B, 1, W, T + M] the rows of `attention_mask` of these
    ) -> Tensor:
        """Run the training pass: T real positions, then M mask slots of many blocks.

        The edit pass runs the slots alone; keys and values of the real positions are those of the first pass. With
        `wanted`, which goes without it, the last layer gives real positions keys and values only, unless they are
        asked for; a head of one layer then needs no `attention_mask`.

        Returns:
            Hidden states [B, T + M or W, H] after the final norm; with `edits` those of both passes, [2, B, T + M, H].
        """
        if any(self.config.windows):
            raise ValueError("This head's layers see a window of the text, and are trained by the code that made them.")
        batch, real = features.shape[:2]
        slots = self.slot_inputs(batch, positions.shape[1] - real)
        x, residual, context = self.inputs(features, next_embeddings).followed_by(slots)
        rotation = rotation_at(positions, self.config, self.dtype)
        known: list[tuple[Tensor, Tensor]] = []  # keys and values of real positions, in the order of their use

        def keep(key: Tensor, value: Tensor, injected: bool = False) -> tuple[Tensor, Tensor]:
            known.append((key[:, :, :real], value[:, :, :real]))
            return key, value

        *before, last = self.layers
        remember = None if edits is None else keep
        for layer in before:
            x = residual = layer(x, residual, rotation, attention_mask, remember, context)
        mask = attention_mask if wanted is None else wanted_mask
        first = self.final(last(x, residual, rotation, mask, remember, context, wanted))
        if edits is None:
            return first
        assert self.editor is not None
        x, residual, context = self.edit_inputs(edits.draft(first), first[:, real:])
        places, left = rotation_at(positions[:, real:], self.config, self.dtype), iter(known)

        def recall(key: Tensor, value: Tensor, injected: bool = False) -> tuple[Tensor, Tensor]:
            known_key, known_value = next(left)
            return torch.cat([known_key, key], dim=2), torch.cat([known_value, value], dim=2)

        for layer in self.layers:
            x = residual = layer(x, residual, places, edits.mask, recall, context)
        again = self.editor(first[:, real:], self.final(x))
        return torch.stack([first, torch.cat([first[:, :real], again], dim=1)])

    def final(self, x: Tensor) -> Tensor:
        """Apply the final norm to the last layer's output [..., H], for the LM head."""
        return self.norm(self.norm(x)) if self.config.double_norm else self.norm(x)
