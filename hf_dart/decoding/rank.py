"""Candidate tokens of a draft: the drafter's distributions, processed as the target's will be.

Nothing here can change the output; it only decides what is worth verifying. So the target's processors are
imitated where that is cheap (temperature, repetition penalty, nucleus), and not run.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_dart.trees.vocabulary import columns_of

_CHUNK = 256  # of a chunk
# The nucleus is searched among this many tokens; if it is wider, all are kept.
_NUCLEUS = 64


class Ranker:
    """Turns draft logits into K scored candidates per depth.

    Args:
        processors: those of the call, to be imitated.
        top_k: K.
    """

    def __init__(self, processors: LogitsProcessorList, top_k: int) -> None:
        self._top_k = top_k
        self._penalty = 1.0
        self._temperature = 1.0
        self._top_p = 1.0
        self._limit = 0
        for processor in processors:
            if isinstance(processor, RepetitionPenaltyLogitsProcessor):
                self._penalty *= processor.penalty
            elif isinstance(processor, TemperatureLogitsWarper):
                self._temperature *= processor.temperature
            elif isinstance(processor, TopPLogitsWarper):
                self._top_p = min(self._top_p, processor.top_p)
            elif isinstance(processor, TopKLogitsWarper):
                self._limit = processor.top_k

    @property
    def needs_history(self) -> bool:
        """True if the ranking depends on the tokens so far."""
        return self._penalty != 1.0

    def __call__(
        self, logits: Tensor, gumbel: Tensor | None, seen: Tensor | None, vocabulary: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Candidates [B, d, K], best first, and their scores [B, d, K].

        Args: as for `scores`.
        """
        logits = self._perturbed(logits, gumbel, seen, vocabulary)
        best, tokens = ranked(logits, min(self._top_k, logits.shape[-1]))
        tokens = tokens if vocabulary is None else vocabulary[tokens]
        return tokens, best - logits.logsumexp(-1, keepdim=True)

    def scores(
        self, logits: Tensor, gumbel: Tensor | None, seen: Tensor | None, vocabulary: Tensor | None = None
    ) -> Tensor:
        """Scores [B, d, V], or [B, d, M], of all tokens.

        Args:
            logits: [B, d, V] of the drafter; [B, d, M] with a `vocabulary`.
            gumbel: [B, d, V] the noise that the target will sample those positions with; None ranks by
                probability.
            seen: [B, V] or [B, M] bool, tokens that a repetition penalty applies to; None for none.
            vocabulary: [M] ids of the tokens that were scored; None for all. Their probabilities then sum to 1.

        Returns:
            Log-scores. With noise, a score is the log-softmax of perturbed logits: how sure the coupled draft is
            that the target will draw this very token.
        """
        return self._perturbed(logits, gumbel, seen, vocabulary).log_softmax(-1)

    def best(self, *scores: Tensor, vocabulary: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Return the candidates [B, d, K] of several drafts: tokens that score best in any, and their scores in each.

        Args:
            scores: of `scores`, per draft.
            vocabulary: as for `scores`.
        """
        either = torch.stack(scores).amax(0)
        columns = ranked(either, min(self._top_k, either.shape[-1]))[1]
        tokens = columns if vocabulary is None else vocabulary[columns]
        return tokens, [each.gather(-1, columns) for each in scores]

    def _perturbed(
        self, logits: Tensor, gumbel: Tensor | None, seen: Tensor | None, vocabulary: Tensor | None
    ) -> Tensor:
        logits = logits.float()
        if seen is not None:
            penalised = torch.where(logits > 0, logits / self._penalty, logits * self._penalty)
            logits = torch.where(seen[:, None], penalised, logits)
        if gumbel is not None:
            if vocabulary is not None:
                gumbel = gumbel[..., vocabulary.to(gumbel.device)]
            logits = self._warp(logits) + gumbel.to(logits.device)
        return logits

    def _warp(self, logits: Tensor) -> Tensor:
        if self._temperature != 1.0:
            logits = logits / self._temperature
        if self._top_p == 1.0 and not self._limit:
            return logits
        width = min(_NUCLEUS, logits.shape[-1])
        best = ranked(logits, min(self._limit or width, width))[0]
        if self._top_p == 1.0:
            return logits.masked_fill(logits < best[..., -1:], -inf)
        before = (best - logits.logsumexp(-1, keepdim=True)).exp().cumsum(-1).roll(1, -1)
        before[..., 0] = 0
        # The nucleus holds every token before which less than top_p of the mass lies.
        floor = best.masked_fill(before >= self._top_p, inf).amin(-1, keepdim=True)
        return logits.masked_fill(logits < floor, -inf)


class SeenTokens:
    """Set of the tokens that occur in each row's text, kept up as the texts grow.

    Args:
        texts: per row its token ids so far; the lists are shared and grow from outside.
    """

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts = texts
        self._marked = [0] * len(texts)
        self._seen: Tensor | None = None

    def __call__(self, logits: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """[B, V] bool ([B, M] of a draft vocabulary), on the device of the draft's `logits` [B, d, V] or [B, d, M]."""
        if self._seen is None:
            self._seen = torch.zeros(logits.shape[0], logits.shape[-1], dtype=torch.bool, device=logits.device)
        for row, text in enumerate(self._texts):
            columns = torch.tensor(text[self._marked[row] :], dtype=torch.long, device=logits.device)
            if vocabulary is not None:
                columns = columns_of(columns, vocabulary, -1)
                columns = columns[columns >= 0]
            self._seen[row, columns] = True
            self._marked[row] = len(text)
        return self._seen


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of `scores` [..., V], and where they are: both [..., k], the largest first.

    Equal scores stand in the order of their places, as a stable sort would leave them; `torch.topk` has them in any.

    One pass reads all scores for the maxima of chunks; only the k chunks of the largest maxima are sorted. They hold
    the k best: whatever stands in another chunk has k maxima before it.
    """
    size = scores.shape[-1]
    chunks = -(-size // _CHUNK)
    if chunks <= 2 * k:
        return _first(scores, k)
    padded = torch.nn.functional.pad(scores, (0, chunks * _CHUNK - size), value=-inf).unflatten(-1, (chunks, _CHUNK))
    chosen = _first(padded.amax(-1), k)[1].sort(-1).values  # ascending, so that places stay in order
    kept = padded.gather(-2, chosen[..., None].expand(*chosen.shape, _CHUNK)).flatten(-2)
    best, places = _first(kept, k)
    return best, chosen.gather(-1, places // _CHUNK) * _CHUNK + places % _CHUNK


def ranked(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the `k` largest scores and their tokens, like `largest`, but by `torch.topk` on a CPU, where it is faster.

    Ties may then come in any order. Of 8 x 152,000 scores, one thread takes 1.5 ms for `torch.topk` and 3.1 ms for
    `largest`; on a GPU, `torch.topk` makes several passes over all scores.
    """
    return largest(scores, k) if scores.is_cuda else scores.topk(k)


def _first(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best, places = scores.sort(dim=-1, descending=True, stable=True)
    return best[..., :k], places[..., :k]
