"""`DraftNetwork`: a network that reads tokens through a target's embeddings and scores them with its LM head."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.drafters.target_modules import TargetReader
from hf_dart.target.devices import where_it_runs


class DraftNetwork(TargetReader, PreTrainedModel):
    """The network of a drafter, without the target's modules: `bind` lends it those of one target.

    A subclass makes its modules in `__init__`, which ends with `self.post_init()`, and has the training pass as
    `forward`.
    """

    config: Any
    draft_vocabulary: Tensor | None
    """[M] ids of the tokens that its logits are about, ascending; None for all."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("draft_vocabulary", None)

    @property
    def lm_head_weights(self) -> int:
        """How many weights of the target's LM head score a draft."""
        weights = int(self.shared.lm_head.weight.numel())
        if self.draft_vocabulary is None:
            return weights
        return weights * len(self.draft_vocabulary) // self.shared.embeddings.num_embeddings

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...] to the target's embeddings [..., E], on the network's device and in its dtype.

        What is floating already is a prompt given as `inputs_embeds`.
        """
        embeddings = tokens if tokens.is_floating_point() else self.shared.embed(tokens)
        return embeddings.to(device=self.device, dtype=self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to logits [..., V] of the target's LM head."""
        lm_head = self.shared.lm_head
        dtype = lm_head.weight.dtype
        return where_it_runs(lm_head, hidden.to(dtype) if dtype.is_floating_point else hidden)

    def get_input_embeddings(self) -> None:
        """None: tokens are embedded by the target. FSDP asks."""
