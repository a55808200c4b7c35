"""What stock hands a target beside text with every token: is it no matter, so that drafts may be verified without?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.cache.base import TreeCache
from hf_dart.models.masks import MaskKind
from hf_dart.models.verify import Verifier
from hf_dart.trees.tree import DraftTree


class _Handing(Verifier):
    """A verifier that hands the target more than drafts are verified with."""

    beside: Mapping[str, Any] = {}

    def extra_inputs(
        self, tree: DraftTree, positions: Tensor, masks: Tensor | dict[str, Tensor], computed: Tensor | None
    ) -> dict[str, Any]:
        return dict(self.beside)


def refuse_what_matters(
    target: PreTrainedModel, cache: TreeCache, kinds: list[MaskKind], shift: Tensor | None, beside: Mapping[str, Any]
) -> None:
    """Raise where a token after the prompt has other logits with what stock hands on beside text than without.

    PaliGemma's processor marks the tokens of the prompt, and stock goes on marking those that it generates, which
    nothing looks at; of Qwen2.5-Omni stock keeps the mask of a sound that the prefill has read. GPT-2 has embeddings of
    such marks, and Mllama attends by them to images.

    Args:
        target: the causal LM.
        cache: after the prefill; it is left as it was.
        kinds: `mask_kinds` of it.
        shift: [..., B] of `position_shift`.
        beside: those inputs of stock's step after the prompt that are not text (`beside_text`).

    Raises:
        ValueError: the message names them.
    """
    if not beside:
        return
    batch, logits = len(cache.lengths), []
    for handed in ({}, beside):
        verify = _Handing(target, cache, kinds, [], shift=shift)
        verify.beside = handed
        cache.prepare(1)
        roots = cache.lengths - 1  # at the end of the text, where the position table cannot end yet
        root = DraftTree.chain(torch.zeros(batch, 1, dtype=torch.long, device=target.device))
        logits.append(verify.run(root, roots.to(target.device))[0])
        cache.commit(torch.zeros(batch, 1, dtype=torch.long), [0] * batch)
    if not torch.equal(*logits):
        raise ValueError(
            f"{type(target).__name__} is handed more than text with every token ({', '.join(beside)}), and drafts are "
            "not verified with it; leave it out, or leave assistant= out."
        )
