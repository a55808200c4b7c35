"""`UnoTrainer`: a LoRA by which its target drafts for itself, trained over the target's own keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_dart.drafters.stock_modules import View, attention_kinds
from hf_dart.drafters.uno.drafter import UnoDrafter
from hf_dart.models.attention import for_trees
from hf_dart.models.features import features_request, gather_features, layer_count
from hf_dart.training.objective.blocks import document_positions, target_positions
from hf_dart.training.options import option
from hf_dart.training.trainers.arguments import DrafterArguments, DrafterTrainingArguments
from hf_dart.training.trainers.trainer import DrafterTrainer


@dataclass
class UnoArguments(DrafterArguments):
    """A [`UnoDrafter`]."""

    mask_token_id: int | None = option(None, "what masked tokens are read as; default: an unused token")
    rank: int | None = option(None, "r of the LoRA; default: 32")
    alpha: float | None = option(None, "its scale times the rank; default: 2 r")
    target_modules: list[str] | None = option(None, "modules that it stands on; default: of attention and MLP")


class UnoTrainer(DrafterTrainer[UnoDrafter]):
    """Trainer of a [`UnoDrafter`]: the target reads a text once, without the LoRA; then all blocks are run over that.

    Args:
        drafter: as `UnoDrafter.from_target(target)` or `from_pretrained(..., target=target)` gives it.
        target, args, kwargs: as for [`DrafterTrainer`].

    Raises:
        ValueError: the drafter does not fit the target, or that keeps more than keys and values.
    """

    drafter_arguments = (UnoArguments,)
    training_arguments = DrafterTrainingArguments

    def __init__(
        self, drafter: UnoDrafter, target: PreTrainedModel, args: DrafterTrainingArguments, **kwargs: Any
    ) -> None:
        _, self._kinds = attention_kinds(target)
        super().__init__(drafter, target, args, **kwargs)

    @torch.no_grad()
    def teach(self, ids: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Run the target over a text; its last hidden states, keys and values are kept for `block_states`."""
        positions, places = document_positions(documents), torch.arange(ids.shape[1], device=ids.device)
        seen = (documents[:, :, None] == documents[:, None]) & (places[:, None] >= places)
        view = View(positions, positions, seen, positions)
        self._text = DynamicCache()  # without a config: all of the text is kept, windows are the masks'
        with for_trees(self.target):
            output = self.target(
                input_ids=ids,
                position_ids=positions,
                attention_mask=view.masks(self._kinds, self.target.dtype, ids.device),
                past_key_values=self._text,
                use_cache=True,
                **features_request(last := [layer_count(self.target)]),
            )
        return gather_features(output, last, ids), output.logits

    def block_states(self, model: nn.Module, inputs: dict[str, Any], features: Tensor, target_logits: Tensor) -> Tensor:
        ids, documents = inputs["input_ids"], inputs["documents"]
        roots = inputs["anchors"].clamp(min=0) + 1
        masked, (rows, blocks) = self.drafter.draft_length - 1, roots.shape
        text = document_positions(documents)
        tokens = ids.new_full((rows, blocks * masked), self.drafter.config.mask_token_id)
        # Positions in the document, which the text's are as well.
        positions = target_positions(text.gather(1, roots), masked).flatten(1)
        places = torch.arange(ids.shape[1], device=ids.device)
        own = documents.gather(1, roots)[..., None] == documents[:, None]
        known = (own & (places <= roots[..., None])).repeat_interleave(masked, dim=1)
        block = torch.arange(blocks * masked, device=ids.device)
        causal = (block[:, None] // masked == block // masked) & (block[:, None] >= block)
        seen = torch.cat([known, causal.expand(rows, -1, -1)], dim=-1)
        view = View(positions, positions, seen, torch.cat([text, positions], dim=1))
        masks = view.masks(self._kinds, self.target.dtype, ids.device)
        states = model(tokens=tokens, positions=positions, attention_mask=masks, cache=self._text)
        # The first of each draft is what the target says after the root.
        first = features.gather(1, roots[..., None].expand(-1, -1, features.shape[-1]))[:, :, None]
        return torch.cat([first.to(states.dtype), states.unflatten(1, (blocks, masked))], dim=2)
