"""`Ring`: the latest verified positions of what was served, bounded in bytes; a `Recorder` takes them from a call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor

from hf_dart.decoding.session import Observer, Session
from hf_dart.drafters.base import Verified
from hf_dart.models.devices import where_it_runs
from hf_dart.models.features import layer_count
from hf_dart.models.tolerance import same

SEGMENT = 256  # positions of a text that are kept in one piece; what comes later does not look back farther
PROMPT = 128  # positions of the end of a prompt that are kept in addition
BEST = 64  # tokens of the target's distribution that are kept where the features do not determine it


@dataclass(frozen=True)
class Segment:
    """Consecutive verified positions of one text."""

    features: Tensor  # [n, F] of the target, as the drafter reads them
    next_tokens: Tensor  # [n] the token after each position
    begun: Tensor  # [n] bool, the positions that rounds began after
    temperature: float  # that the text was sampled with; 0 for greedy search
    prompt: int = 0  # how many of the positions, at the beginning, are of a prompt
    best: tuple[Tensor, ...] = ()  # logits and tokens [n, k] of the target's best k; empty if features determine them

    def __len__(self) -> int:
        return len(self.next_tokens)

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return sum(part.nbytes for part in (self.features, self.next_tokens, self.begun, *self.best))


class Ring:
    """The latest segments, in up to `limit` bytes. Threads may share it; copies and pickles are empty."""

    def __init__(self, limit: int) -> None:
        self.limit, self._lock = limit, Lock()
        self.fresh: deque[Segment] = deque()  # nothing was learnt from these yet
        self.learnt: deque[Segment] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return Ring, (self.limit,)

    @property
    def bytes(self) -> int:
        """Memory that the segments take."""
        return sum(one.bytes for one in (*self.learnt, *self.fresh))

    def add(self, segment: Segment) -> None:
        """Keep a segment, and drop the oldest ones that there is no room for."""
        with self._lock:
            self.fresh.append(segment)
            while self.bytes > self.limit:
                (self.learnt or self.fresh).popleft()

    @property
    def waiting(self) -> int:
        """Number of fresh positions."""
        with self._lock:
            return sum(map(len, self.fresh))

    def take_fresh(self) -> list[Segment]:
        """Return the fresh segments, which are learnt from from now on."""
        with self._lock:
            taken, self.fresh = self.fresh, deque()
            self.learnt.extend(taken)
        return [*taken]

    def draw(self, count: int, generator: torch.Generator) -> list[Segment]:
        """Draw segments to learn from: half of them the latest ones, the others from all."""
        with self._lock:
            learnt = [*self.learnt]
        count = min(count, len(learnt))
        latest = learnt[len(learnt) - (count + 1) // 2 :]
        others = torch.randint(len(learnt), (count - len(latest),), generator=generator).tolist()
        drawn = [*reversed(latest), *(learnt[number] for number in others)]
        return [one for one in drawn if len(one.best) == len(drawn[0].best)]  # what goes into one batch


class Recorder(Observer):
    """Observer of one call that hands its verified positions to a learner, in segments.

    Unfinished segments may take `room` bytes; rows that do not fit are left out.
    """

    def __init__(self, learner: Any, session: Session, room: int) -> None:
        self._learner, self._room = learner, room
        # The session itself refers to its observers.
        self._stats, self._request, self._text = session.stats, session.request, session.rows
        self._determined: bool | None = None  # the logits by the features
        self._counted, self._rounds, self._width = 0.0, 0, 0
        self._rows: list[list[Any]] = []  # of each row the parts of a segment since the last one, chunk by chunk
        self._prompt: list[int] = []  # positions at their beginning that are of the prompt

    def verified(self, seen: Verified, logits: Callable[[], Tensor] | None) -> None:
        """Keep verified positions; of a prompt the last ones."""
        if self._learner.paused:
            self._rows = []
            return
        if not seen.next_tokens.is_floating_point():  # a prompt of embeddings has no tokens
            self._add(seen, logits)
        if logits is not None:
            self._rounds += 1
            if self._learner.every is not None and self._rounds % self._learner.every == 0:
                self._learner.served(self._seconds())

    def ended(self, finished: bool) -> None:
        """Hand on what is left of the call."""
        self._close()
        if finished:
            self._learner.served(self._seconds())

    def _seconds(self) -> float:
        """Return the time that the call has taken since this was asked last."""
        total = sum(self._stats.seconds.values())
        since, self._counted = total - self._counted, total
        return since

    def _add(self, seen: Verified, logits: Callable[[], Tensor] | None) -> None:
        target, drafter = self._request.model, cast(Any, self._request.drafter)
        best: Any = ()
        if logits is not None:
            there = logits()
            if self._determined is None:
                self._determined = determined(target, drafter, seen, there)
            if not self._determined:
                best = there.topk(min(BEST, drafter.config.vocab_size))
        else:
            seen = seen.split(PROMPT)[1]
            shape = (*seen.next_tokens.shape, min(BEST, drafter.config.vocab_size))
            best = seen.features.new_zeros(shape), seen.next_tokens.new_zeros(shape)
        rows = max(1, self._room // (SEGMENT * seen.features[0, 0].nbytes))
        counts = self._text.without_pads(seen.counts.tolist()[:rows])
        if not self._rows:
            self._rows = [[] for _ in counts]
            self._prompt = counts if logits is None else [0] * len(counts)
        place = drafter.device  # a prompt may lie on the host, with its tokens and the first logits
        for row, count in enumerate(counts):
            last = (torch.arange(count) == count - 1) & (logits is not None)
            self._rows[row].append([last, *(part[row, :count].to(place) for part in (*seen[:2], *best))])
        self._width += seen.next_tokens.shape[1]
        if self._width >= SEGMENT:
            self._close()

    def _close(self) -> None:
        """Hand on the positions since the last segment, of each row."""
        rows, self._rows, self._width = self._rows, [], 0
        if self._determined is None:
            return
        config = self._request.generation_config
        temperature = float(config.temperature or 1.0) if config.do_sample else 0.0
        with torch.inference_mode(False):  # tensors made in inference mode could not be trained on
            for chunks, own in zip(rows, self._prompt, strict=False):
                # A prompt's chunk was made before it was known whether logits are to be kept.
                begun, features, tokens, *best = (torch.cat(part) for part in zip(*chunks, strict=False))
                best = [] if self._determined else best
                self._learner.keep(Segment(features, tokens, begun, temperature, own, (*best,)))


def determined(target: Any, drafter: Any, seen: Verified, logits: Tensor) -> bool:
    """Return True if the LM head gives the target's logits [B, A, V] of the last features that the drafter reads."""
    layers, lm_head = drafter.feature_layers, drafter.shared.lm_head
    if not layers or layers[-1] != layer_count(target):
        return False
    with torch.no_grad():
        last = seen.features[..., -(seen.features.shape[-1] // len(layers)) :]
        return same(where_it_runs(lm_head, last[:, :1]), logits[: len(last), :1].to(last.device))
