"""What a user may bring to `generate`: processors, criteria, streamers, a tokenizer, a clock, a model of their own."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from support.tiny import VOCABULARY


def letters(order: str) -> Any:
    """A tokenizer whose ids are the places of letters in `order`."""
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(order)}, []))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZER = letters(string.ascii_letters[:VOCABULARY])
"""As many letters as there are tokens: ids and texts map one to one."""


class OwnError(Exception):
    """Raised by what a user brings."""


class Stopped(KeyboardInterrupt):
    """As by Ctrl-C, at a known moment."""


def fail(error: type[BaseException] = OwnError) -> Any:
    """Raise, in an expression."""
    raise error


class Listener(BaseStreamer):
    """A streamer that keeps tokens and their dtype in `calls`, those of the prompt first, and at the end "end".

    It fails at the token `last`, 0 being the prompt; `tokens` counts those after the prompt.
    """

    def __init__(self, last: int | None = None, error: type[BaseException] = OwnError) -> None:
        self.last, self.error = last, error
        self.calls: list[Any] = []
        self.tokens = 0

    def put(self, value: Tensor) -> None:
        self.tokens = len(self.calls)
        self.calls.append((value.tolist(), value.dtype))
        if self.tokens == self.last:
            raise self.error

    def end(self) -> None:
        self.calls.append("end")


class Processor(LogitsProcessor):
    """One of several kinds, and a record of its calls."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.calls: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append((input_ids.to(torch.long, copy=True), scores.clone()))
        if self.kind == "reads ids":
            liked = (input_ids[:, -1:] * 7 + torch.arange(3)) % scores.shape[-1]
            return scores.scatter_add(1, liked, torch.full(liked.shape, 1.5)) if input_ids.shape[1] else scores
        if self.kind == "keeps count":
            return scores.roll(1, -1) if len(self.calls) % 5 == 0 else scores
        if self.kind == "looks across rows":
            return scores - 0.5 * scores.softmax(-1).mean(0) + 0.1 * scores.amax()
        if self.kind == "draws":
            return scores + torch.randn(scores.shape[-1])
        if self.kind == "nan":
            return scores if len(self.calls) != 4 else torch.full_like(scores, torch.nan)
        if self.kind == "raises" and len(self.calls) == 4:
            raise OwnError
        scores[:, 5::9] += 0.7  # in place
        return scores


FORM = [{5}, {6}, {7}, {2, 3, 4, 8}, {9}, {10}, {11, 12}]
"""Tokens that are allowed one after the other, over and over."""


class Form:
    """The grammar of `FORM`."""

    def allowed(self, text: Sequence[int]) -> list[int]:
        fits = all(token in FORM[place % len(FORM)] for place, token in enumerate(text))
        return sorted(FORM[len(text) % len(FORM)]) if fits else []

    def forced(self, text: Sequence[int]) -> list[int]:
        found: list[int] = []
        while len(only := self.allowed([*text, *found])) == 1:
            found += only
        return found


class FormProcessor(LogitsProcessor):
    """Allows what `FORM` does after prompts of a length; offers its grammar."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt

    def grammar(self, row: int) -> Form:
        return Form()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = FORM[(input_ids.shape[1] - self.prompt) % len(FORM)]
        return scores.masked_fill(~torch.isin(torch.arange(scores.shape[-1]), torch.tensor([*allowed])), -torch.inf)


class Criterion(StoppingCriteria):
    """As `Processor`. Unlike EOS, stock lets rows that a criterion ended run on beside the others."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.calls: list[tuple[Tensor, Any]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls.append((input_ids.to(torch.long, copy=True), scores))
        ends = torch.isin(input_ids[:, -1], torch.tensor([3, 4, 5, 6]))
        if self.kind == "ends rows":
            return ends
        if self.kind == "a column":
            return ends[:, None]
        if self.kind == "one row ends all":
            return ends.any() & torch.ones_like(ends)
        if self.kind == "keeps count":
            return torch.full_like(ends, len(self.calls) >= 11)
        if self.kind == "raises" and len(self.calls) == 6:
            raise OwnError
        return torch.rand(len(ends)) < 0.1  # draws


class Clock:
    """A second passes with every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        self.now += 1.0
        return self.now


def allowed(row: int, ids: Tensor) -> list[int]:
    """Tokens of one parity, by row and by how many there are."""
    return list(range((row + len(ids)) % 2, VOCABULARY, 2))


class FromFive(LlamaForCausalLM):
    """Positions begin at 5."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs["position_ids"] = inputs["position_ids"] + 5
        return inputs
