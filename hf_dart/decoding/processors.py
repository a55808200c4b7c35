"""Known logits processors and stopping criteria of stock, and so the ways in which a walk may call them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from hf_dart.models.features import vocabulary_size


class AdditivePenaltyLogitsProcessor(LogitsProcessor):
    """Penalty of tokens that a text has already, subtracted from their scores, as OpenAI's API has it.

    Source: https://platform.openai.com/docs/api-reference/completions: `presence` is subtracted once, `frequency` for
    each time that the token is there after the prompt.
    """

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [B, V] after the texts [B, P + T]."""
        written = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


# All compared by exact type: what a subclass does is not known. These look at scores [B, V] alone.
_SCORES_ALONE = (
    transformers.TemperatureLogitsWarper, transformers.TopKLogitsWarper, transformers.InfNanRemoveLogitsProcessor,
    transformers.LogitNormalization, transformers.SuppressTokensLogitsProcessor, transformers.TopPLogitsWarper,
    transformers.TopHLogitsWarper, transformers.MinPLogitsWarper, transformers.TypicalLogitsWarper,
    transformers.EpsilonLogitsWarper, transformers.EtaLogitsWarper,
)  # fmt: skip
# These keep nothing from call to call, and are asked row by row where rows part: with ids [1, T] and scores [1, V].
_ROW_BY_ROW = (
    *_SCORES_ALONE, transformers.MinLengthLogitsProcessor, transformers.MinNewTokensLengthLogitsProcessor,
    transformers.NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor,
    transformers.SequenceBiasLogitsProcessor, transformers.NoBadWordsLogitsProcessor,
    transformers.ForcedBOSTokenLogitsProcessor, transformers.ForcedEOSTokenLogitsProcessor,
    transformers.ExponentialDecayLengthPenalty, transformers.SuppressTokensAtBeginLogitsProcessor,
    AdditivePenaltyLogitsProcessor,
)  # fmt: skip
# So do these, which are asked after each token, without scores.
_CRITERIA = (transformers.MaxLengthCriteria, transformers.EosTokenCriteria, transformers.StopStringCriteria)
_FILTERS = (transformers.TopKLogitsWarper, transformers.TopPLogitsWarper)  # in the order in which stock appends them
XGRAMMAR = "xgrammar.contrib.hf.LogitsProcessor"
OUTLINES_XGRAMMAR = "outlines.backends.xgrammar.XGrammarLogitsProcessor"
OUTLINES_LLGUIDANCE = "outlines.backends.llguidance.LLGuidanceLogitsProcessor"


def kind_of(processor: Any) -> str:
    """Return the full name of a processor's class, by which those of packages that need not be installed are known."""
    return f"{type(processor).__module__}.{type(processor).__name__}"


def compiled_of(processor: Any, row: int) -> Any:
    """Return the compiled grammar of a row by a processor of xgrammar, which has one for all rows or one for each."""
    grammars = processor.compiled_grammars
    return grammars[row if len(grammars) > 1 else 0]


def _sizes(processor: Any) -> list[int]:
    """Return how many tokens a processor's grammars were compiled for, where it tells."""
    kind = kind_of(processor)
    if kind == XGRAMMAR:
        return [one.tokenizer_info.vocab_size for one in processor.compiled_grammars]
    if kind == OUTLINES_XGRAMMAR:
        return [processor.compiled_grammar.tokenizer_info.vocab_size]
    return [processor.llg_tokenizer.vocab_size] if kind == OUTLINES_LLGUIDANCE else []


def refuse_grammars(processors: LogitsProcessorList, target: Any, rows: int) -> None:
    """Raise for grammars of another number of rows than the call's, or of more tokens than the target has."""
    for count in (len(one.compiled_grammars) for one in processors if kind_of(one) == XGRAMMAR):
        if count not in (1, rows):
            raise ValueError(
                f"The processor has {count} grammars for {rows} rows of text; give one, or one for each row."
            )
    for size in (size for processor in processors for size in _sizes(processor)):
        known = vocabulary_size(target)
        if size > known:
            raise ValueError(
                f"The grammar was compiled for a tokenizer of {size} tokens, and the target has {known}; compile it "
                f"for the target's own (with xgrammar, TokenizerInfo.from_huggingface(tokenizer, vocab_size={known}))."
            )


def _new_xgrammar(processor: Any) -> bool:
    """Return True for a processor of xgrammar that no call has used."""
    return kind_of(processor) == XGRAMMAR and not processor.matchers


def scores_alone(processors: LogitsProcessorList) -> bool:
    """Return True if all processors read scores alone, so that one call can process all nodes of a tree."""
    return all(type(processor) in _SCORES_ALONE for processor in processors)


def of_rows(processors: LogitsProcessorList, batch_size: int) -> list[LogitsProcessorList]:
    """Return processors for each row that do to it alone what known `processors` do in the batch."""
    if batch_size == 1:
        return [processors]
    return [LogitsProcessorList([_of_row(processor, row) for processor in processors]) for row in range(batch_size)]


def _of_row(processor: Any, row: int) -> Any:
    if _new_xgrammar(processor):
        return type(processor)(compiled_of(processor, row))
    # The only one of stock's with state per row: where the padding ends.
    if type(processor) is RepetitionPenaltyLogitsProcessor and isinstance(processor.prompt_ignore_length, Tensor):
        alone = copy.copy(processor)
        alone.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        return alone
    return processor


def needs_stocks_steps(processors: LogitsProcessorList, criteria: Any, streamer: Any, config: Any) -> bool:
    """Return True if all rows must go in step, one call per position on the whole batch, as calls may do anything.

    A processor or criterion that is not known may keep state from call to call, look across rows, read the clock or
    draw from the global generator, as a streamer may. What is collected per step is collected for ended rows too.
    """
    draws = config.do_sample and not (streamer is None or type(streamer).__module__.startswith("transformers."))
    collects = config.return_dict_in_generate and (
        config.output_scores or config.output_logits or config.output_hidden_states
    )
    return bool(
        collects
        or draws
        or not all(type(processor) in _ROW_BY_ROW or _new_xgrammar(processor) for processor in processors)
        or any(type(criterion) not in _CRITERIA for criterion in criteria)
    )


@dataclass(frozen=True)
class Filters:
    """Filters that a list of processors ends with, each of which keeps the tokens with the largest scores.

    The token that wins a draw among all tokens wins it among those that are kept too, if it is one of them: only that
    is found out, where stock's top-p sorts the whole vocabulary for each token.
    """

    processors: Sequence[Any]
    top_k: int = 0  # 0 for no such filter
    top_p: float = np.inf

    @classmethod
    def split(cls, processors: LogitsProcessorList) -> tuple[LogitsProcessorList, Self | None]:
        """Return a list without the filters of stock's that it ends with, and those; min-p of 0 removes no token."""
        processors = LogitsProcessorList([one for one in processors if getattr(one, "min_p", True)])
        for kinds in (_FILTERS, _FILTERS[:1], _FILTERS[1:]):
            before, found = processors[: -len(kinds)], processors[-len(kinds) :]
            usual = (one.filter_value == -np.inf and one.min_tokens_to_keep == 1 for one in found)
            if tuple(map(type, found)) == kinds and all(usual):
                limits = getattr(found[0], "top_k", 0), getattr(found[-1], "top_p", np.inf)
                return LogitsProcessorList(before), cls(found, *limits)
        return processors, None

    def draw(self, scores: Tensor, noise: Tensor) -> int | None:
        """Return the token that stock draws from scores [1, V] on a CPU with Exp(1) noise [1, V].

        None where roundings decide: two tokens close to each other, or a token at the edge of a filter.
        """
        scores = scores[0].detach()
        values, probabilities = scores.numpy(), scores.softmax(-1).numpy()
        eps = np.finfo(np.float32).eps
        near, near_mass = 16 * eps, (len(values) / 8 + 16) * eps  # bounds of a quotient's and of a sum's roundings
        kept = 1.0  # the share that top-k keeps, which top-p is a share of
        if self.top_p < 1 and 0 < self.top_k < len(values):
            kept = probabilities[values >= np.partition(values, -self.top_k)[-self.top_k]].sum()
        races = probabilities / noise[0].numpy()
        while True:
            token = int(races.argmax())
            if not 0 < races[token] < np.inf or np.count_nonzero(races >= races[token] * (1 - near)) > 1:
                return None
            above = values > values[token]
            before = probabilities[above].sum() / kept  # the share of those that score more, and of its equals
            tied = (np.count_nonzero(values == values[token]) - 1) * probabilities[token] / kept
            if before > self.top_p + near_mass or 0 < self.top_k <= np.count_nonzero(above):
                races[values <= values[token]] = 0  # nor is any that scores less kept
            else:
                return token if before + tied < self.top_p - near_mass else None
