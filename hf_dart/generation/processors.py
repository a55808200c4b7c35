"""What is known of stock's logits processors and stopping criteria, and so how a walk may call them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

# All compared by exact type: what a subclass does is not known.
_CHEAP = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    SuppressTokensLogitsProcessor,
)
_SCORES_ALONE = (
    *_CHEAP,
    TopPLogitsWarper,
    TopHLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)
_ROW_FREE = (
    *_SCORES_ALONE,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    NoBadWordsLogitsProcessor,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    ExponentialDecayLengthPenalty,
    SuppressTokensAtBeginLogitsProcessor,
)
# These hold something per row of the batch, and see the whole batch therefore.
_ROW_BOUND = (
    RepetitionPenaltyLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
)
_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)


def scores_alone(processors: LogitsProcessorList, device: torch.device) -> bool:
    """Do they read scores alone, so that one call can do all nodes, and is that the cheaper way there?

    On an accelerator anything is cheaper than reading a token back; a CPU sorts only the nodes on the path.
    """
    known = _CHEAP if device.type == "cpu" else _SCORES_ALONE
    return all(type(processor) in known for processor in processors)


def row_free(processors: LogitsProcessorList) -> bool:
    """Is what they do to a row the same, whatever other rows stand beside it?"""
    return all(type(processor) in _ROW_FREE for processor in processors)


def needs_stocks_steps(processors: LogitsProcessorList, criteria: Any, generation_config: Any) -> bool:
    """Must all rows go in step, one call per position on the whole batch, because calls may do anything?

    A processor or criterion that is not known may keep state from call to call, look across rows, read the
    clock or draw from the global generator. What is collected per step is collected for ended rows too.
    """
    config = generation_config
    collects = config.return_dict_in_generate and (
        config.output_scores or config.output_logits or config.output_hidden_states
    )
    return bool(
        collects
        or any(type(processor) not in (*_ROW_FREE, *_ROW_BOUND) for processor in processors)
        or any(type(criterion) not in _CRITERIA for criterion in criteria)
    )
