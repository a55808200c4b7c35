"""Draft vocabularies: a head that scores some of the target's tokens only (FR-Spec, arXiv 2502.14856).

Frequent tokens carry almost all drafts. What lies outside is never drafted: the target says those tokens itself.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from hf_dart.models.devices import has_rows, state_of, where_it_runs

# As tokenizers name them: <|reserved_special_token_7|>, <unused7>, [MASK].
_PLACEHOLDER = re.compile(r"reserved|unused|mask", re.IGNORECASE)


def checked(tokens: Any, vocab_size: int) -> Tensor:
    """Return `tokens` as a draft vocabulary [M] of ascending int64 ids, or raise a `ValueError` if they are none."""
    ids = torch.as_tensor(tokens, dtype=torch.long).flatten().sort().values.cpu()
    if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or len(ids.unique()) < len(ids):
        raise ValueError(
            f"A draft vocabulary names different token ids of 0..{vocab_size - 1}, at least one; "
            "hf_dart.training.data.frequent.frequent_tokens makes one."
        )
    return ids


class LMHeadRows:
    """The rows of an LM head that belong to a draft vocabulary, copied out once: gathering them takes long."""

    def __init__(self) -> None:
        self._rows: tuple[Any, Tensor, nn.Linear] | None = None

    def __call__(self, lm_head: nn.Module, hidden: Tensor, vocabulary: Tensor) -> Tensor:
        """Hidden states [..., H], in the LM head's dtype, to logits [..., M]."""
        if not has_rows(lm_head):
            return where_it_runs(lm_head, hidden)[..., vocabulary]
        rows = self.layer(lm_head, vocabulary)
        return rows(hidden.to(rows.weight.device)).to(hidden.device)

    def layer(self, lm_head: nn.Linear, vocabulary: Tensor) -> nn.Linear:
        """Return the layer [M, H] of these rows, made anew if the LM head has changed."""
        weight, known = lm_head.weight, self._rows
        # When traced, the rows are up to date: `engine` makes them before, and again when weights change.
        if known is not None and torch.compiler.is_compiling():
            return known[2]
        if known is None or known[0] != state_of(weight) or known[1] is not vocabulary:
            with torch.inference_mode(False):  # tensors made in inference mode could not be trained through later
                rows = vocabulary.to(weight.device)
                layer = nn.Linear(weight.shape[1], len(rows), bias=lm_head.bias is not None, device="meta")
                layer.weight = nn.Parameter(weight.detach()[rows], requires_grad=False)
                if lm_head.bias is not None:
                    layer.bias = nn.Parameter(lm_head.bias.detach()[rows], requires_grad=False)
                self._rows = known = (state_of(weight), vocabulary, layer)
        return known[2]


def unused_token(tokenizer: Any, vocab_size: int) -> int:
    """Return an id of the embedding table that no text contains: the last padding row or placeholder, or the pad."""
    rows, special = set(range(vocab_size)), tokenizer.special_tokens_map
    # Of added tokens only: an ordinary token "mask" is a word.
    added = tokenizer.added_tokens_decoder.items()
    placeholders = {int(token) for token, name in added if _PLACEHOLDER.search(str(name))}
    others = [name for role, name in special.items() if role != "pad_token"]
    pads = {tokenizer.pad_token_id} if tokenizer.pad_token not in others else set()  # one that ends texts is in them
    for group in (rows - set(tokenizer.get_vocab().values()), placeholders & rows, pads & rows):
        if group:
            return max(group)
    raise ValueError(
        f"All {vocab_size} ids of this tokenizer belong to tokens that texts may contain; give mask_token_id, the "
        "id of one that yours never do, or use mask_mode='learned'."
    )
