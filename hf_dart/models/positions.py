"""The reach of a target's positions, and rotary frequencies that follow the length of the text."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_dart.models.stock_steps import cache_name


@dataclass(frozen=True)
class MovingRotary:
    """Rotary frequencies that are chosen again in each forward, by the largest position in it.

    Attributes:
        trained: the first position that has other frequencies.
        grows: they go on changing with every position ("dynamic"); otherwise they switch once ("longrope").
    """

    trained: int
    grows: bool

    @classmethod
    def of(cls, target: PreTrainedModel) -> MovingRotary | None:
        """Return those of a target; None if it has none that move."""
        text = target.config.get_text_config(decoder=True)
        rope = getattr(text, "rope_parameters", None) or {}
        for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):
            if kind.get("rope_type") == "dynamic":
                return cls(int(text.max_position_embeddings), grows=True)
            if kind.get("rope_type") == "longrope":
                trained = kind.get("original_max_position_embeddings") or text.max_position_embeddings
                return cls(int(trained), grows=False)
        return None


def position_limit(target: PreTrainedModel) -> tuple[int, bool]:
    """Return the last position a draft may reach, and whether that holds for all later rounds too.

    Rotary frequencies that follow the largest position in the call would change for the whole tree when one node
    crosses the length they were trained for, so drafts end there.
    """
    rotary = MovingRotary.of(target)
    if rotary is not None:
        return rotary.trained - 1, rotary.grows
    table = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    # XLNet gives -1, which means no limit.
    return (int(table) - 1 if table and table > 0 else sys.maxsize), False


def refuse_crossing(target: PreTrainedModel, pads: list[int], cached: int, total: int, most: int) -> None:
    """Raise where rotary frequencies that follow the longest row would tie the rows of a batch together.

    Args:
        target: the causal LM.
        pads: left padding per row.
        cached: slots of the prompts that are in the cache already.
        total: slots of the prompts.
        most: slots of the prompts and of all tokens that may be generated.

    Raises:
        ValueError: a batch grows past the length such frequencies were trained for; or stock would throw its
            cache away there (Phi-3) and compute the whole text again.
    """
    rotary = MovingRotary.of(target)
    if rotary is None:
        _refuse_forgetting(target, cached or total, most)
        return
    # The last token is not run through the model.
    if most - 1 <= rotary.trained:
        return
    starts_anew = _starts_anew(target, rotary)
    if not rotary.grows and total - min(pads) > rotary.trained and not (starts_anew and 0 < cached <= rotary.trained):
        return
    if len(pads) > 1 or starts_anew:
        raise ValueError(
            f"{type(target).__name__} changes its rotary frequencies beyond {rotary.trained} tokens, for "
            f"{'the text so far' if starts_anew else 'all rows of a batch'} too; set max_length to "
            f"{rotary.trained + 1} or less, or leave assistant= out."
        )


def _starts_anew(target: PreTrainedModel, rotary: MovingRotary) -> bool:
    """Return True if stock drops its cache where the rotary frequencies change (Phi-3)."""
    return not rotary.grows and hasattr(target.config, "original_max_position_embeddings")


def refuse_shifted(target: PreTrainedModel, shift: Tensor | None, most: int) -> None:
    """Raise where rotary frequencies may change with the length of texts whose positions are not their tokens' numbers.

    Args:
        target: the causal LM.
        shift: [..., B] of `stock_steps.position_shift`.
        most: slots of the prompts and of all tokens that may be generated.

    Raises:
        ValueError: they may.
    """
    rotary = MovingRotary.of(target)
    if rotary is None or shift is None or not bool(shift.any()):
        return
    alone = shift.shape[-1] == 1 and not _starts_anew(target, rotary)
    if not alone and most - 1 + max(int(shift.max()), 0) > rotary.trained:
        raise ValueError(
            f"{type(target).__name__} changes its rotary frequencies beyond {rotary.trained} positions, and those of "
            "this prompt are not the usual ones; set a smaller max_length, or leave assistant= out."
        )


def _refuse_forgetting(target: PreTrainedModel, held: int, most: int) -> None:
    """Raise where stock goes on from the last token alone once it drops its cache (Phi-3, transformers <= 5.18)."""
    switch = getattr(target.config, "original_max_position_embeddings", None)
    if switch is None or not held <= switch < most - 1:
        return
    name, cache, ids = cache_name(target), DynamicCache(), torch.zeros(1, switch + 1, dtype=torch.long)
    cache.update(torch.zeros(1, 1, switch, 1), torch.zeros(1, 1, switch, 1), 0)
    inputs = target.prepare_inputs_for_generation(ids, **{name: cache}, next_sequence_length=1, use_cache=True)
    if inputs.get(name) is not cache and inputs["input_ids"].shape[1] <= switch:
        raise ValueError(
            f"{type(target).__name__} of this transformers release forgets the text at {switch} tokens, and drafts "
            f"do not; set max_length to {switch + 1} or less, update transformers, or leave assistant= out."
        )
