"""`Logprobs`: log-probabilities of a text's tokens, before temperature and the like, as its rounds are verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from hf_dart.drafters.base import Verified


class TokenLogprob(NamedTuple):
    """A token, its log-probability, and the likeliest tokens in its place with theirs."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Logprobs:
    """Observer (`hf_dart.decoding.session.Observer`) of one text.

    Args:
        top: how many of the likeliest tokens are kept beside each.

    Attributes:
        kept: of every token so far.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self.kept: list[TokenLogprob] = []

    def verified(self, seen: Verified, logits: Callable[[], Tensor] | None) -> None:
        """Keep the log-probabilities at positions of the text."""
        if logits is None:
            return
        count = int(seen.counts)
        tokens = seen.next_tokens[0, :count].tolist()
        for token, scores in zip(tokens, logits()[0, :count].float().log_softmax(-1), strict=True):
            best = scores.topk(min(self._top, len(scores)))
            top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            self.kept.append(TokenLogprob(token, float(scores[token]), top))

    def ended(self, finished: bool) -> None:
        """Keep what there is."""
