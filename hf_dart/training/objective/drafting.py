"""Passes that draft all blocks of a batch at once, as training needs them, for each kind of head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_dart.drafters.dart.drafter import DartHead
from hf_dart.drafters.eagle.drafter import EagleDrafter
from hf_dart.training.objective.blocks import Blocks, build_blocks, target_positions


def head_blocks(head: DartHead, inputs: dict[str, Any]) -> Blocks:
    """Positions and masks of the blocks of a batch (`documents` [B, T], `anchors` [B, K]), as its config asks."""
    config, both = head.config, head.config.block_attention == "bidirectional"
    return build_blocks(inputs["documents"], inputs["anchors"], config.draft_length, both, shifted=config.shift_logits)


def head_states(
    head: DartHead,
    model: nn.Module,  # the head, or what `accelerate` has made of it
    inputs: dict[str, Any],  # `documents` [B, T] and `anchors` [B, K]
    features: Tensor,  # [B, T, F] of the target
    embeddings: Tensor,  # [B, T - 1, E] of the tokens after each position
) -> Tensor:
    """Return the states [B, K, d, H] of the blocks of a batch, as `DartHead.propose` would give them there."""
    blocks = head_blocks(head, inputs)
    states = model(features=features[:, :-1], next_embeddings=embeddings, **blocks.inputs(head.config.num_layers))
    return states.unflatten(1, (-1, head.draft_length))


def eagle_states(
    drafter: EagleDrafter, model: nn.Module, inputs: dict[str, Any], features: Tensor, embeddings: Tensor
) -> Tensor:
    """Return the states [B, K, d, H] of the blocks of a batch: d - 1 passes after every anchor; see `head_states`."""
    anchors = inputs["anchors"]
    blocks = build_blocks(inputs["documents"], anchors, drafter.draft_length)
    # Pass j after anchor n reads the token n + 1 + j, j = 1..d - 1, which is the embedding at n + j.
    places = target_positions(anchors.clamp(min=0), drafter.draft_length)[..., :-1]
    flat = places.flatten(1)[..., None].expand(-1, -1, embeddings.shape[-1])
    return model(
        features=features[:, :-1],
        next_embeddings=embeddings,
        drafted_embeddings=embeddings.gather(1, flat).unflatten(1, places.shape[1:]),
        anchors=anchors,
        positions=blocks.positions,
        attention_mask=blocks.mask,
    )
