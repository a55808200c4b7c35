"""The network of a diffusion drafter: a masked language model over text and slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dart.drafters.diffusion.configuration import DiffusionConfig
from hf_dart.drafters.layers import DartLayer, rotation_at
from hf_dart.drafters.trained import TrainedDrafter

MASK = -1
"""Stands for the mask token where token ids are expected; it is no entry of the vocabulary and has no logit."""


class DiffusionModel(TrainedDrafter):
    """The network of a [`DiffusionDrafter`]: its modules, and the pass that training runs."""

    config: DiffusionConfig
    base_model_prefix = "diffusion"
    main_input_name = "tokens"
    _no_split_modules = ["DartLayer"]  # noqa: RUF012

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        if config.share_embeddings:
            self.embedding_norm = nn.RMSNorm(config.embedding_size, config.rms_norm_eps)
            self.embedding_proj = nn.Linear(config.embedding_size, hidden, bias=False)
            same = hidden == config.lm_head_size
            self.output_proj = nn.Identity() if same else nn.Linear(hidden, config.lm_head_size, bias=False)
        else:
            self.token_embedding = nn.Embedding(config.vocab_size, hidden)
        if config.feature_layers:
            self.feature_proj = nn.Linear(config.features_width, hidden, bias=False)
            self.feature_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        # An Embedding, not a Parameter: PEFT's modules_to_save trains and saves modules only.
        self.mask_token = nn.Embedding(1, hidden)
        self.layers = nn.ModuleList(DartLayer(config, pairs=False, normed=True) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if self.config.share_embeddings and module is self.output_proj and isinstance(module, nn.Linear):
            # The target's LM head reads normed states, for which the usual initial scale would be far too small.
            nn.init.normal_(module.weight, std=self.config.hidden_size**-0.5)
        else:
            super()._init_weights(module)

    # ---- the pass -----------------------------------------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...], `MASK` for masked ones, to what goes into the first layer [..., H].

        What is floating already, [..., E], is a prompt given as `inputs_embeds`. A drafter with a table of its own
        knows no tokens there and reads them as masked.
        """
        if tokens.is_floating_point() and not self.config.share_embeddings:
            tokens = tokens.new_full(tokens.shape[:-1], MASK, dtype=torch.long)
        if tokens.is_floating_point():
            return self._project(tokens)
        # Asking whether any is masked would make the host wait for the device.
        known = tokens.clamp(min=0).to(self.device)
        if self.config.share_embeddings:
            embedded = self._project(self.shared.embed(known))
        else:
            rows = self.config.vocab_size  # the target's table may have more rows: padding
            tokens = torch.where(tokens < rows, tokens, MASK)
            embedded = self.token_embedding(known.clamp(max=rows - 1))
        return torch.where((tokens < 0).to(self.device)[..., None], self.mask_token.weight[0], embedded)

    def _project(self, embeddings: Tensor) -> Tensor:
        return self.embedding_proj(self.embedding_norm(embeddings.to(device=self.device, dtype=self.dtype)))

    def embed_text(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Entries [B, A, H] of the text, of tokens [B, A] and the features [B, A, F] in front of each."""
        x = self.embed(tokens)
        if self.config.feature_layers:
            features = features.to(device=self.device, dtype=self.dtype)
            x = x + self.feature_norm(self.feature_proj(features))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] from the output of `forward`, [..., H] of the LM head."""
        if not self.config.share_embeddings:
            return F.linear(hidden, self.token_embedding.weight)
        return super().logits(hidden)

    def read_out(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.output_proj(x) if self.config.share_embeddings else x

    def forward(
        self,
        tokens: Tensor,  # [B, T + M]
        features: Tensor,  # [B, T, F]; F is 0 without feature layers
        positions: Tensor,  # [B, T + M]
        attention_mask: Tensor | None,  # [B, 1, T + M, T + M] bool; None for one layer with `wanted`
        wanted: Tensor | None = None,  # [B, W] entries
        wanted_mask: Tensor | None = None,  # [B, 1, W, T + M] the rows of `attention_mask` of these
    ) -> Tensor:
        """Run the training pass: T entries of the text, then M slots of many blocks, `MASK` or known.

        With `wanted` the last layer gives all other entries keys and values only.

        Returns:
            [B, T + M or W, H of the LM head]; `logits` reads distributions off them.
        """
        text = features.shape[1]
        x = torch.cat([self.embed_text(tokens[:, :text], features), self.embed(tokens[:, text:])], dim=1)
        rotation = rotation_at(positions, self.config, self.dtype)
        *before, last = self.layers
        for layer in before:
            x = layer(x, x, rotation, attention_mask, None, None)
        mask = attention_mask if wanted is None else wanted_mask
        return self.read_out(last(x, x, rotation, mask, None, None, wanted))
