"""`DraftNetwork`: a network that reads tokens through a target's embeddings and scores them with its LM head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.drafters.target_modules import TargetReader
from hf_dart.drafters.vocabulary import LMHeadRows
from hf_dart.models.devices import rows_of, where_it_runs


class DraftNetwork(TargetReader, PreTrainedModel):
    """The network of a drafter, without the target's modules: `bind` lends it those of one target.

    A subclass makes its modules in `__init__`, which ends with `self.post_init()`, and has the training pass as
    `forward`. It may have an `embed_tokens` and an `lm_head` of its own.
    """

    config: Any
    draft_vocabulary: Tensor | None
    """[M] ids of the tokens that its logits are about, ascending; None for all."""

    lm_head: nn.Linear | None
    """[V, H], or [M, H] of the draft vocabulary, where it scores tokens with one of its own; None for the target's."""
    embed_tokens: nn.Embedding | None
    """[V, E] where it reads tokens by a table of its own; None for the target's."""
    reads_rows = False
    """Are tokens read by the rows of the target's table alone, without the factors that some families put after it?"""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head = self.embed_tokens = None
        self._head_rows = LMHeadRows()
        self.register_buffer("draft_vocabulary", None)

    def make_tables(self, config: Any) -> None:
        """Make what tokens are read and scored by, as a `HeadConfig` says."""
        size = config.draft_vocab_size
        scored = config.vocab_size if size is None else size
        self.lm_head = nn.Linear(config.hidden_size, scored, bias=False) if config.own_lm_head else None
        own = config.embeddings == "own"
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size) if own else None
        self.reads_rows = config.embeddings == "table"
        self.register_buffer("draft_vocabulary", None if size is None else torch.arange(size))

    @property
    def lm_head_weights(self) -> int:
        """How many weights of the target's LM head score a draft."""
        if self.lm_head is not None:
            return 0
        weights = int(self.shared.lm_head.weight.numel())
        if self.draft_vocabulary is None:
            return weights
        return weights * len(self.draft_vocabulary) // self.shared.embeddings.num_embeddings

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...] to embeddings [..., E], on the network's device and in its dtype.

        What is floating already is a prompt given as `inputs_embeds`, of the target's width.
        """
        if self.embed_tokens is not None:
            if tokens.is_floating_point():  # nobody knows which tokens these are
                return self.embed_tokens.weight.new_zeros(*tokens.shape[:-1], self.embed_tokens.embedding_dim)
            return self.embed_tokens(tokens.to(self.device))
        if tokens.is_floating_point():
            embeddings = tokens
        elif self.reads_rows:
            embeddings = rows_of(self.shared.embeddings, tokens)
        else:
            embeddings = self.shared.embed(tokens)
        return embeddings.to(device=self.device, dtype=self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to logits of the LM head: [..., V], or [..., M] of `draft_vocabulary`."""
        if self.lm_head is not None:
            return self.lm_head(hidden)
        lm_head = self.shared.lm_head
        dtype = lm_head.weight.dtype
        hidden = hidden.to(dtype) if dtype.is_floating_point else hidden
        if self.draft_vocabulary is None:
            return where_it_runs(lm_head, hidden)
        return self._head_rows(lm_head, hidden, self.draft_vocabulary)

    def get_input_embeddings(self) -> None:
        """None: tokens are embedded by the target. FSDP asks."""
