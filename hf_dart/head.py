"""`DartHead`: a draft head that is made for a target, kept in files and attached to the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hf_dart.copied import copied_fields, initialise
from hf_dart.drafting import DraftingModel
from hf_dart.hub.mixin import PushWithCard
from hf_dart.refine import BigramSelector
from hf_dart.vocabulary import checked, unused_token

if TYPE_CHECKING:
    from typing_extensions import Self


class DartHead(PushWithCard, DraftingModel):
    """A draft head for one target, which lends its token embeddings and its LM head.

    `DartHead.from_target(model)` makes an untrained head, `DartHead.from_pretrained(path, target=model)`
    loads a trained one, also as DART's own code published it (`hf_dart.hub.original_dart`); both check the fit and
    let `model.generate(..., assistant=head)` work.
    """

    @classmethod
    def from_target(
        cls,
        target: Any,
        *,
        tokenizer: Any = None,
        draft_vocabulary: Sequence[int] | Tensor | None = None,
        copy_layer: int | Literal["last"] | None = None,
        seed: int = 0,
        **config: Any,
    ) -> Self:
        """A new, untrained head fitted to `target`.

        Args:
            target: the causal LM to draft for.
            tokenizer: its tokenizer, whose hash is then kept in the config and checked at load.
            draft_vocabulary: [M] the only tokens to be drafted (`reduce_vocabulary`); None for all.
            copy_layer: make the head's layers frozen copies of the target's, from this one (0..L - 1) on, or of its
                last ones; LoRA and the new parts are then to be trained (`hf_dart.copied`).
            seed: of the initial weights; the global generators are not moved.
            config: fields of [`DartConfig`] that shall differ from the paper's head.

        Raises:
            ValueError: a field is out of range, or the target's layers cannot be copied.
        """
        if tokenizer is not None and config.get("mask_mode") == "peagle" and config.get("mask_token_id") is None:
            config["mask_token_id"] = unused_token(tokenizer, int(target.get_input_embeddings().num_embeddings))
        if copy_layer is not None:
            config = copied_fields(target, copy_layer, **config)
        head = super().from_target(target, tokenizer=tokenizer, seed=seed, **config)
        if copy_layer is not None:
            initialise(head, target)
        return head if draft_vocabulary is None else head.reduce_vocabulary(draft_vocabulary)

    @classmethod
    def _from_published(cls, path: str, content: dict[str, Any], target: Any, tokenizer: Any, **kwargs: Any) -> Self:
        from hf_dart.hub.original_dart import is_original, read_original

        if not is_original(content):
            return super()._from_published(path, content, target, tokenizer, **kwargs)
        dtype = kwargs.pop("dtype", None)
        return read_original(cls, path, content, target, tokenizer, **kwargs)._fit(target, tokenizer, dtype=dtype)

    def add_selector(self, rank: int, seed: int = 0) -> Self:
        """Give a trained head a bigram selector (`hf_dart.refine`); untrained, it changes no score.

        Args:
            rank: its width.
            seed: of its initial weights; the global generators are not moved.
        """
        self.config.selector_rank = rank
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            selector = BigramSelector(self.config)
            selector.apply(self._init_weights)
        self.selector = selector.to(device=self.device, dtype=self.dtype)
        return self

    def reduce_vocabulary(self, tokens: Sequence[int] | Tensor | None) -> Self:
        """Let the head score and draft these tokens only; the output of `generate` stays the same.

        Fewer rows of the target's LM head are read for a draft. A trained head may be given any vocabulary, at any
        time; `hf_dart.vocabulary.frequent_tokens` counts which one loses least.

        Args:
            tokens: [M] ids; None for the whole vocabulary.

        Raises:
            ValueError: there are none, or some are no ids of the target's; or the head has an LM head of its own.
        """
        if self.lm_head is not None:
            raise ValueError("This head scores tokens with an LM head of its own, whose vocabulary cannot be changed.")
        ids = None if tokens is None else checked(tokens, self.config.vocab_size).to(self.device)
        self.config.draft_vocab_size = None if ids is None else len(ids)
        self.draft_vocabulary = ids
        return self
