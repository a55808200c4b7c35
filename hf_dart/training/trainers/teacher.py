"""The frozen target as the teacher of a drafter: its features and logits of a batch, from one forward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.drafters.trained import TrainedDrafter
from hf_dart.models.attention import for_trees
from hf_dart.models.verify import features_request, gather_features, merged_embeddings
from hf_dart.training.objective.blocks import document_positions


class Teacher:
    """A target in evaluation mode, whose weights stay as they are.

    Args:
        target: the causal LM.
        drafter: the drafter that learns from it.
    """

    def __init__(self, target: PreTrainedModel, drafter: TrainedDrafter) -> None:
        self.target = target.eval()
        self.drafter = drafter
        self._packing_checked = False

    @torch.no_grad()
    def text(self, ids: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, T, F] and logits [B, T, V] of packed rows of text.

        Padding comes after the documents, where causal attention does not look: it needs no mask. Documents of one row
        are kept apart by positions that begin again at 0, which transformers turns into the mask of every kind of
        layer.

        Args:
            ids, documents: [B, T].

        Raises:
            ValueError: rows hold several documents and this target does not keep them apart.
        """
        packed = bool((documents > 0).any())
        if packed and not self._packing_checked:
            self._check_packing(ids.device)
        with for_trees(self.target) if packed else nullcontext():
            output = self.target(
                input_ids=ids,
                position_ids=document_positions(documents) if packed else None,
                use_cache=False,
                **features_request(self.drafter.feature_layers),
            )
        return self._features_of(output, ids), output.logits.to(self.drafter.device)

    @torch.no_grad()
    def images(self, ids: Tensor, beside: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Features [B, T, F] and logits [B, T, V] of rows of one document each, with images or sounds.

        Args:
            ids: [B, T].
            beside: what else the target is given (`collate`).

        Returns:
            Features, logits, and what the drafter reads of each token: the embeddings [B, T, E] with those of images in
            their places where it reads as the target does, else ids [B, T].
        """
        seen = {
            name: value.to(self.target.dtype) if value.is_floating_point() else value for name, value in beside.items()
        }
        output = self.target(input_ids=ids, use_cache=False, **seen, output_hidden_states=True)
        read = merged_embeddings(self.target, output, ids) if self.drafter.reads_embeddings else None
        if read is None:  # ids of images may have no embedding
            read = torch.where(ids < self.target.get_input_embeddings().num_embeddings, ids, 0)
        return self._features_of(output, ids), output.logits.to(self.drafter.device), read

    def _features_of(self, output: Any, ids: Tensor) -> Tensor:
        features = gather_features(output, self.drafter.feature_layers, ids)
        features = features.to(self.drafter.device)
        if not torch.is_autocast_enabled(self.drafter.device.type):
            features = features.to(self.drafter.dtype)  # a target in 16 bits and a head in float32
        return features

    def _check_packing(self, device: torch.device) -> None:
        """Change a token of a first document: the logits of a second one in the row must not notice."""
        positions = torch.arange(8, device=device).repeat(2)[None]
        ids = torch.arange(16, device=device)[None].repeat(2, 1)
        ids[1, 0] += 1
        try:
            with for_trees(self.target):
                output = self.target(input_ids=ids, position_ids=positions.expand(2, -1), use_cache=False)
            change = (output.logits[0] - output.logits[1]).abs().float()
            apart = bool(change[8:].max() <= 1e-2 * change[:8].max())
        except TypeError:  # no position_ids
            apart = False
        if not apart:
            raise ValueError(
                f"{type(self.target).__name__} does not keep packed documents apart by their positions; give "
                "rows of one document each, as PackedTokens(..., share_rows=False) does."
            )
        self._packing_checked = True
