"""Logits processors on fixed shapes: stock's scores, from what lies on the device.

Those that are functions of scores and of numbers are stock's own, but for top-p on a GPU (`nucleus`). What others read
of the text is kept up to date as tensors: which tokens a row holds (the repetition penalty), and how many it has
generated (the minimum lengths).
"""

from __future__ import annotations

from copy import deepcopy
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitNormalization,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_dart.decoding.rows import Rows
from hf_dart.engine.nucleus import outside_nucleus

# All compared by exact type: what a subclass does is not known.
_OF_SCORES = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, LogitNormalization)
_PENALTY = RepetitionPenaltyLogitsProcessor.__name__

Key = tuple[tuple[Any, ...], ...]


def key(processors: LogitsProcessorList, prompt_length: int) -> Key | None:
    """What rounds with these processors have in common; None if one of them cannot be part of a round.

    Args:
        processors: of a call.
        prompt_length: P, slots of its prompts.
    """
    keys = [_key(processor, prompt_length) for processor in processors]
    # Two penalties might count different parts of the text.
    if None in keys or sum(type(one) is RepetitionPenaltyLogitsProcessor for one in processors) > 1:
        return None
    return tuple(one for one in keys if one is not None)


def sees_text(processors: Key) -> bool:
    """Does one of them ask which tokens a row holds?"""
    return any(name == _PENALTY for name, *_ in processors)


def _key(processor: Any, prompt_length: int) -> tuple[Any, ...] | None:
    kind = type(processor)
    if kind in _OF_SCORES:
        if all(isinstance(value, (int, float)) for value in vars(processor).values()):
            return kind.__name__, *sorted(vars(processor).items())
    elif kind is RepetitionPenaltyLogitsProcessor:
        if max(_ignored(processor)) <= prompt_length:
            return kind.__name__, processor.penalty
    elif kind in (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor):
        return kind.__name__, *processor.eos_token_id.flatten().tolist()
    elif kind is SuppressTokensLogitsProcessor:
        return kind.__name__, *processor.suppress_tokens.tolist()
    return None


def _ignored(penalty: Any) -> list[int]:
    """How many slots in front of a text do not count: of each row, or [n] of all."""
    ignored = vars(penalty).get("prompt_ignore_length")  # newer releases leave padding out
    return ignored.tolist() if isinstance(ignored, Tensor) else [ignored or 0]


class FixedProcessors:
    """The processors of calls that have one `key`.

    Args:
        processors: of one such call; copied, since the call's own are the user's to change.
        vocab_size: V.
        device: of the scores.
    """

    def __init__(self, processors: LogitsProcessorList, vocab_size: int, device: torch.device) -> None:
        self.processors = deepcopy(processors)
        self._least = torch.zeros(len(processors), dtype=torch.long, device=device)
        self._masks: list[Tensor | None] = []
        for processor in processors:
            tokens = vars(processor).get("eos_token_id", vars(processor).get("suppress_tokens"))
            places = torch.arange(vocab_size)
            self._masks.append(None if tokens is None else torch.isin(places, tokens.cpu()).to(device))

    def load(self, processors: LogitsProcessorList, rows: Rows, seats: list[int], seen: Tensor) -> None:
        """Take over what differs between calls.

        Args:
            processors: of the call, of the same `key`.
            rows: its texts.
            seats: B of them, those that take part.
            seen: [B, V] is filled in with the tokens that they hold; [B, 0] where `sees_text` is false.
        """
        least = [0] * len(processors)
        for place, processor in enumerate(processors):
            if type(processor) is MinLengthLogitsProcessor:
                least[place] = processor.min_length - rows.prompt_length
            elif type(processor) is MinNewTokensLengthLogitsProcessor:
                least[place] = processor.min_new_tokens + processor.prompt_length_to_skip - rows.prompt_length
            elif type(processor) is RepetitionPenaltyLogitsProcessor:
                seen.zero_()
                ignored = _ignored(processor)
                for seat, row in enumerate(seats):
                    known = rows.ids(row)[0, ignored[row % len(ignored)] :]
                    seen[seat, known[known < seen.shape[1]]] = True
        self._least.copy_(torch.tensor(least, dtype=torch.long))

    def __call__(self, scores: Tensor, seen: Tensor, emitted: Tensor) -> Tensor:
        """Scores [R, V] as stock's processors leave them.

        Args:
            scores: [R, V] float32.
            seen: [R, V] which tokens stand in front of each; not looked at where `sees_text` is false.
            emitted: [R] how many of them were generated.
        """
        for place, (processor, mask) in enumerate(zip(self.processors, self._masks, strict=True)):
            if type(processor) is RepetitionPenaltyLogitsProcessor:
                penalised = torch.where(scores < 0, scores * processor.penalty, scores / processor.penalty)
                scores = torch.where(seen, penalised, scores)
            elif type(processor) is TopPLogitsWarper and scores.is_cuda:
                outside = outside_nucleus(scores, processor.top_p, processor.min_tokens_to_keep)
                scores = scores.masked_fill(outside, processor.filter_value)
            elif mask is None:
                scores = processor(None, scores)
            elif type(processor) is SuppressTokensLogitsProcessor:
                scores = scores.masked_fill(mask, -inf)
            else:
                scores = scores.masked_fill(mask & (emitted < self._least[place])[:, None], -inf)
        return scores
