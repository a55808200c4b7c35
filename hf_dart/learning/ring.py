"""`Ring`: the latest verified positions of what was served, bounded in bytes; a `Recorder` takes them from a call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from hf_dart.decoding.session import Session, joined
from hf_dart.drafters.base import Verified
from hf_dart.models.devices import where_it_runs
from hf_dart.models.features import layer_count
from hf_dart.models.tolerance import same

SEGMENT = 256
"""Positions of a text that are kept in one piece; what comes later does not look back farther."""
PROMPT = 128
"""Positions of the end of a prompt that are kept in addition."""
BEST = 64
"""Tokens of the target's distribution that are kept where the features do not determine it."""


@dataclass(frozen=True)
class Segment:
    """Consecutive verified positions of one text.

    Attributes:
        features: [n, F] of the target, as the drafter reads them.
        next_tokens: [n] the token after each position.
        temperature: that the text was sampled with; 0 for greedy search.
        prompt: how many of the positions, at the beginning, are of a prompt.
        logits, best: [n, k] of the target and the tokens they are of, not of a prompt; None where the features
            determine them.
    """

    features: Tensor
    next_tokens: Tensor
    temperature: float
    prompt: int = 0
    logits: Tensor | None = None
    best: Tensor | None = None

    def __len__(self) -> int:
        return len(self.next_tokens)

    @property
    def unknown(self) -> int:
        """Number of positions at the beginning whose logits are not known."""
        return 0 if self.logits is None else self.prompt

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        parts = (self.features, self.next_tokens, self.logits, self.best)
        return sum(part.nbytes for part in parts if part is not None)


class Ring:
    """The latest segments, oldest out first.

    Args:
        limit: most bytes that they take.

    Attributes:
        fresh: those that nothing was learnt from yet.
        learnt: the others.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self.fresh: deque[Segment] = deque()
        self.learnt: deque[Segment] = deque()

    def add(self, segment: Segment) -> None:
        """Keep a segment, and drop the oldest ones that there is no room for."""
        self.fresh.append(segment)
        self.bytes += segment.bytes
        while self.bytes > self.limit:
            self.bytes -= (self.learnt or self.fresh).popleft().bytes

    @property
    def waiting(self) -> int:
        """Number of fresh positions."""
        return sum(map(len, [*self.fresh]))

    def take_fresh(self) -> list[Segment]:
        """Return the fresh segments, which are learnt from from now on."""
        taken = [*self.fresh]
        self.learnt.extend(taken)
        self.fresh.clear()
        return taken

    def draw(self, count: int, generator: torch.Generator) -> list[Segment]:
        """Draw segments to learn from: half of them the latest ones, the others from all."""
        count = min(count, len(self.learnt))
        latest = [len(self.learnt) - 1 - back for back in range((count + 1) // 2)]
        others = torch.randint(len(self.learnt), (count - len(latest),), generator=generator).tolist()
        drawn = [self.learnt[number] for number in latest + others]
        return [one for one in drawn if (one.logits is None) == (drawn[0].logits is None)]  # what goes into one batch


class Recorder:
    """Observer of one call (`decoding.session.Observer`) that hands its verified positions on in segments.

    Args:
        learner: the [`Learner`] that takes them.
        session: the call.
        room: bytes that unfinished segments may take; rows that do not fit are left out.
    """

    def __init__(self, learner: Any, session: Session, room: int) -> None:
        self._learner, self._session, self._room = learner, session, room
        config = session.request.generation_config
        self._temperature = float(config.temperature or 1.0) if config.do_sample else 0.0
        self._determined: bool | None = None  # the logits by the features
        self._counted = 0.0
        self._clear()

    def _clear(self) -> None:
        self._seen: list[Verified] = []
        self._best: list[Any] = []  # logits and tokens [B, A, k] for each of `_seen`
        self._prompt: Tensor | None = None  # positions [B] at the beginning that are of the prompt
        self._width = 0

    def verified(self, seen: Verified, logits: Callable[[], Tensor] | None) -> None:
        """Keep verified positions; of a prompt the last ones."""
        if self._learner.paused:
            self._clear()
            return
        if not seen.next_tokens.is_floating_point():  # a prompt of embeddings has no tokens
            self._add(seen, logits)
        if logits is not None:
            self._learner.after_round(self._seconds())

    def ended(self, finished: bool) -> None:
        """Hand on what is left of the call."""
        self._close()
        self._learner.after_call(self._seconds(), finished)

    def _seconds(self) -> float:
        """Return the time that the call has taken since this was asked last."""
        total = sum(self._session.stats.seconds.values())
        since, self._counted = total - self._counted, total
        return since

    def _add(self, seen: Verified, logits: Callable[[], Tensor] | None) -> None:
        target, drafter = self._session.request.model, cast(Any, self._session.request.drafter)
        if logits is None and seen.next_tokens.shape[1] > PROMPT:
            seen = seen.split(PROMPT)[1]
        rows = max(1, min(len(seen.counts), self._room // (SEGMENT * seen.features[0, 0].nbytes)))
        seen = Verified(*(part[:rows] for part in seen))
        if logits is None:
            self._prompt = seen.counts
            shape = (*seen.next_tokens.shape, min(BEST, drafter.config.vocab_size))
            best: Any = seen.features.new_zeros(shape), seen.next_tokens.new_zeros(shape)
        else:
            there = logits()[:rows]
            if self._determined is None:
                self._determined = determined(target, drafter, seen, there)
            best = None if self._determined else there.topk(min(BEST, drafter.config.vocab_size))
        self._seen.append(seen)
        self._best.append(best)
        self._width += seen.next_tokens.shape[1]
        if self._width >= SEGMENT:
            self._close()

    def _close(self) -> None:
        """Hand on the positions since the last segment, of each row."""
        seen, best, prompt = self._seen, self._best, self._prompt
        self._clear()
        if not seen or self._determined is None:
            return
        with torch.inference_mode(False):  # tensors made in inference mode could not be trained on
            features, tokens, counts = joined(seen)
            parts = [features, tokens]
            if not self._determined:
                for each in zip(*best, strict=True):
                    chunks = zip(each, seen, strict=True)
                    parts.append(joined([Verified(part, *one[1:]) for part, one in chunks]).features)
            for row, count in enumerate(counts.tolist()):
                kept = [part[row, :count].clone() for part in parts]
                own = 0 if prompt is None else int(prompt[row])
                self._learner.keep(Segment(kept[0], kept[1], self._temperature, own, *kept[2:]))


def determined(target: Any, drafter: Any, seen: Verified, logits: Tensor) -> bool:
    """Return True if the LM head gives the target's logits [B, A, V] of the features that the drafter reads.

    Where it reads the last hidden state, and the target does nothing to what its LM head returns.
    """
    layers, lm_head = drafter.feature_layers, drafter.shared.lm_head
    if not layers or layers[-1] != layer_count(target):
        return False
    with torch.no_grad():
        last = seen.features[..., -(seen.features.shape[-1] // len(layers)) :]
        return same(where_it_runs(lm_head, last[:, :1]), logits[: len(last), :1].to(last.device))
