"""`Drafter`: what `assistant=` takes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.decoding.api import speculative_generate
from hf_dart.decoding.proposer import Proposer, State
from hf_dart.trees.config import TreeConfig


class Drafter(Proposer[State]):
    """A drafter for `model.generate(..., assistant=drafter)`; subclass it for one of your own.

    It implements `draft_length`, `feature_layers`, `check_target`, `begin`, `extend` and `propose`, and sets
    `tree_config` and `last_stats`; trees, sampling, batches, caches and statistics then work as they are.
    """

    def generate(
        self, model: PreTrainedModel, input_ids: Tensor, tree_config: TreeConfig | None = None, **kwargs: Any
    ) -> Any:
        """`model.generate(..., custom_generate=drafter.generate)`: drafting without `attach`.

        transformers passes neither `streamer` nor `tokenizer` on to a callable; `attach` does.

        Args:
            model: the target.
            input_ids: [B, P] as `generate` has prepared them.
            tree_config: replaces that of the drafter for this call.
            kwargs: the rest of what `generate` has prepared.

        Returns:
            What `model.generate` returns.

        Raises:
            ValueError: something was asked for that could not equal stock's output.
        """
        return speculative_generate(model, input_ids, assistant=self, tree_config=tree_config, **kwargs)
