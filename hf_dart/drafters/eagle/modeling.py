"""The network of an EAGLE head: one decoder layer over tokens and what stands in front of each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_dart.drafters.eagle.configuration import EagleConfig
from hf_dart.drafters.layers import DartLayer, KeyValueWriter, rotation_at
from hf_dart.drafters.network import DraftNetwork


class EagleModel(DraftNetwork):
    """The network of an [`EagleDrafter`]: its modules, and the pass that training runs."""

    config: EagleConfig
    base_model_prefix = "eagle"
    main_input_name = "features"
    _no_split_modules = ["DartLayer"]  # noqa: RUF012

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.features_width, config.hidden_size, bias=False)
        self.embedding_norm = nn.RMSNorm(config.embedding_size, config.rms_norm_eps)
        self.feature_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layer = DartLayer(config, pairs=True)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)

    def step(
        self,
        embeddings: Tensor,
        features: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor,
        remember: KeyValueWriter,
    ) -> Tensor:
        """The layer over embeddings [B, Q, E] and what stands in front of each token, [B, Q, H]: states [B, Q, H]."""
        pairs = torch.cat([self.embedding_norm(embeddings), self.feature_norm(features)], dim=-1)
        return self.layer(pairs, features, rotation, mask, remember, None)

    def forward(
        self,
        features: Tensor,  # [B, T, F]
        next_embeddings: Tensor,  # [B, T, E]
        drafted_embeddings: Tensor,  # [B, K, d - 1, E] of the true tokens after each anchor
        anchors: Tensor,  # [B, K] of 0..T-1; what is below 0 is no block
        positions: Tensor,  # [B, T + K (d - 1)]
        attention_mask: Tensor,  # [B, 1, T + K (d - 1), T + K (d - 1)] bool
    ) -> Tensor:
        """The training pass: d - 1 passes after every anchor, each over the states of the one before.

        That is the training-time test of EAGLE-3 (section 3.2): tokens are the true ones, features its own.

        Returns:
            [B, K, d, H] normed states, the first of each block that of its anchor.
        """
        real = features.shape[1]
        count, steps = drafted_embeddings.shape[1:3]
        rotation = rotation_at(positions, self.config, self.dtype)
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def remember(key: Tensor, value: Tensor, injected: bool = False) -> tuple[Tensor, Tensor]:
            keys.append(key)
            values.append(value)
            return torch.cat(keys, dim=2), torch.cat(values, dim=2)

        known = (rotation[0][:, :, :real], rotation[1][:, :, :real])
        states = self.step(next_embeddings, self.fc(features), known, attention_mask[:, :, :real, :real], remember)
        last = states.gather(1, anchors.clamp(min=0)[..., None].expand(-1, -1, states.shape[-1]))
        places = [part[:, :, real:].unflatten(2, (count, steps)) for part in rotation]
        sees = attention_mask[:, :, real:].unflatten(2, (count, steps))  # [B, 1, K, d - 1, T + K (d - 1)]
        drafted = [last]
        for step in range(steps):
            mask = sees[:, :, :, step]
            # Keys lie pass by pass, those of `attention_mask` block by block.
            own = mask[..., real:].unflatten(-1, (count, steps)).transpose(-1, -2)[..., : step + 1, :].flatten(-2)
            at = (places[0][:, :, :, step], places[1][:, :, :, step])
            mask = torch.cat([mask[..., :real], own], dim=-1)
            last = self.step(drafted_embeddings[:, :, step], last, at, mask, remember)
            drafted.append(last)
        return self.norm(torch.stack(drafted, dim=2))
