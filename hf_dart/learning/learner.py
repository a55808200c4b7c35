"""`Learner`: keeps a head up to date with what is served, from what verified rounds leave at hand."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor

from hf_dart.decoding.session import Session
from hf_dart.drafters.base import Drafter
from hf_dart.drafters.dart.drafter import DartHead
from hf_dart.errors import check_fields
from hf_dart.learning.ring import SEGMENT, Recorder, Ring, Segment
from hf_dart.learning.student import PASSES, SEGMENTS, Student, trained_names
from hf_dart.models.devices import host_by_default

_LESSON = 512  # fresh positions on which the two heads are compared, before they are learnt from
_FEW, _LONGER = 4, 4  # after fewer steps than these, and while learning waits, so many times as many positions
_DRAFTS = 64  # that are compared at a time
_KEPT = 0.7  # weight of earlier comparisons, from one to the next
_SURE = 2.0  # standard errors by which the learnt head has to win before it drafts
_LOST = -2.0  # by which it has lost
_PATIENCE = 6  # comparisons in a row without a win after which a learning rate is given up,
_LEAST = 16  # but not before so many steps: the first ones lead anywhere
_SLEEP = 8192  # positions until learning is tried again after all of them were, the first time; then twice as many
_CHANGE = 0.1  # by which the frozen head's acceptance length changes before that, if the text does
_SPACING = 8  # positions served for each step, at least


@dataclass
class LearnerStats:
    """Figures of what a learner has done.

    Attributes:
        tokens: positions that were recorded.
        steps: of training.
        seconds: that training took, comparisons included.
        serving: seconds that calls took in the meantime.
        tau_before, tau_now: acceptance length on the latest text of the head as it was and of the one that drafts, by
            what each would have drafted before anything was learnt from that text; at positions spread evenly, where
            drafts are better than at those of rounds. NaN before the first comparison.
        learnt: the head drafts with what it has learnt.
        learning_rate: of the steps that are taken now; None while there is nothing to learn.
    """

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    serving: float = 0.0
    tau_before: float = math.nan
    tau_now: float = math.nan
    learnt: bool = False
    learning_rate: float | None = None

    @property
    def share(self) -> float:
        """Time of training as a share of that of serving."""
        return self.seconds / self.serving if self.serving else 0.0

    def __str__(self) -> str:
        return (
            f"tau {self.tau_before:.2f} -> {self.tau_now:.2f} on the latest text; {self.tokens} positions, "
            f"{self.steps} steps in {self.seconds:.1f} s ({self.share:.0%} of serving)"
        )


class _Recent:
    """Mean of recent figures, also in standard errors (0 where nothing differs); earlier ones count less."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64)  # of ones, figures and their squares
        self.mean = self.errors = 0.0

    def add(self, figures: Tensor) -> None:
        """Add some figures [n]."""
        self._sums = _KEPT * self._sums + torch.stack([figures.double() ** power for power in range(3)]).sum(1)
        count, total, squares = self._sums.tolist()
        self.mean, variance = total / count, squares / count - (total / count) ** 2
        self.errors = self.mean / math.sqrt(variance / count) if variance > 0 else 0.0


class Learner:
    """Training of a head on what it drafts for, between calls: `attach(model, head, learner=Learner())`.

    Verified rounds leave all that training needs: the target's hidden states, the tokens, and its distributions. They
    are kept in memory on this machine, the latest in so many bytes; the target runs no forward more, and its weights
    stay as they are. The text of every call stays stock's: it depends on the target and the seed alone.

    A copy of the head learns. On new text, before it is learnt from, the two are compared by what they would have
    drafted; the head drafts with what was learnt as long as that wins. Learning begins at the first of the learning
    rates; one that does not win is left for the next, and after the last one learning waits for other text.

    Args:
        lora_rank: train a LoRA of this rank on the head, which is to lie in a folder, instead of all its weights.
        share: most time that training may take, as a share of the time that calls take. 0 never trains by itself;
            then call `step` or `idle`.
        every: train within calls too, after so many rounds; None: between calls only.
        memory: bytes for served text: three quarters are for what is kept; each call that runs takes up to a quarter.
        learning_rates: of Muon, to be tried, the highest first.

    Attributes:
        stats: figures of what was done so far.
        paused: True while nothing is recorded or learnt.
        failure: the error that paused it, if one did.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        lora_rank: int | None = None,
        share: float = 0.1,
        every: int | None = None,
        memory: int = 128 * 2**20,
        learning_rates: tuple[float, ...] = (1e-2, 3e-3, 1e-3),
    ) -> None:
        self.lora_rank, self.share, self.every, self.memory = lora_rank, share, every, memory
        self.learning_rates = tuple(learning_rates)
        check_fields(self, least={"lora_rank": 1, "every": 1}, shares=("share",))
        if not learning_rates or not all(0 < rate < math.inf for rate in learning_rates):
            raise ValueError(f"learning_rates is {learning_rates}; give one or more numbers above 0.")
        self._student: Student | None = None
        self._busy = Lock()
        self.resume()
        self._forget()

    def _forget(self) -> None:
        self._ring = Ring(self.memory - self.memory // 4)  # the rest is for calls that are going on
        self.stats = LearnerStats(learning_rate=self.learning_rates[0])
        self._before, self._gain = _Recent(), _Recent()  # acceptance of the frozen head, and what the learnt one adds
        self._rung = self._missed = self._wake = self._compared = 0
        self._sleep, self._level = _SLEEP, math.nan

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies go on with: the weights, and none of the text."""
        return {**self.__dict__, "_busy": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _busy=Lock())

    @host_by_default
    def attach(self, drafter: Drafter[Any]) -> None:
        """Learn from the calls that `drafter` drafts from now on; `hf_dart.attach(..., learner=)` calls it.

        Raises:
            TypeError: the drafter is of a kind that does not learn.
            ValueError: this drafter cannot learn as it is.
        """
        head, name = cast(Any, drafter), type(drafter).__name__
        if not isinstance(drafter, tuple(PASSES)):
            raise TypeError(f"A Learner takes a DartHead or an EagleDrafter, not a {name}; leave learner= out.")
        if self._student is not None and self._student.head is not drafter:
            raise ValueError("This Learner has a head already; make another Learner for this one.")
        if not all(weight.is_floating_point() for weight in head.parameters()) or hasattr(head, "hf_quantizer"):
            raise ValueError(f"This {name} is quantised, and its weights cannot learn; load it in full precision.")
        if drafter.engine is not None:
            raise ValueError(
                f"The drafts of this {name} are compiled, and would be captured again whenever it has learnt; leave "
                "hf_dart.compile or learner= out."
            )
        if any(getattr(head.config, "windows", None) or ()):
            raise ValueError("This head's layers see a window of the text; train it by the code that made it.")
        least = 4 * SEGMENT * (head.config.feature_size * len(drafter.feature_layers) * head.dtype.itemsize + 8)
        if self.memory < least:
            raise ValueError(f"memory is {self.memory} bytes; give {least} or more for what this {name} reads.")
        if self.lora_rank is not None and self._student is None:
            from peft import LoraConfig

            if not isinstance(drafter, DartHead):
                raise ValueError(f"{name} takes no LoRA here; leave lora_rank out.")
            if head.adapted:
                raise ValueError("The head has an adapter; leave lora_rank out to train it, or merge it into the head.")
            head.add_adapter(LoraConfig(r=self.lora_rank, lora_alpha=2 * self.lora_rank), "learnt")
        if not trained_names(head):
            raise ValueError(f"All weights of this {name} are frozen; call requires_grad_(True) on what may learn.")
        self._student = self._student or Student(head)
        drafter.observers = (*(one for one in drafter.observers if not isinstance(one, Learner)), self)

    def detach(self) -> None:
        """Learn no more; the head keeps what it drafts with."""
        if self._student is not None:
            head = self._student.head
            head.observers = tuple(one for one in head.observers if one is not self)

    def __call__(self, session: Session) -> Recorder:
        """Return what records a call (`Drafter.observers`)."""
        if session.request.drafter.engine is not None and not self.paused:
            self._fail(RuntimeError("the drafts were compiled, which goes with weights that stay"))
        return Recorder(self, session, self.memory // 4)

    def pause(self) -> None:
        """Record and learn nothing until `resume`; the head goes on drafting as it does."""
        self.paused = True

    def resume(self) -> None:
        """Undo `pause`, also that of an error."""
        self.paused, self.failure = False, cast("Exception | None", None)

    @host_by_default
    def reset(self) -> None:
        """Forget all text and all that was learnt: the head drafts as it did when it was attached."""
        with self._busy:
            self._forget()
            if self._student is not None:
                self._student.begin_again()
                self._student.use(False)

    def save(self, path: str) -> None:
        """Write the head as it drafts now, or its adapter, for `from_pretrained`; a `ValueError` if it has no head."""
        with self._busy:
            self._bound().head.save_pretrained(path)

    @host_by_default
    def step(self) -> float | None:
        """Take one step now, whatever `share` says; returns its loss, or None where there is no text to learn from.

        Raises:
            Exception: whatever a step raises; the head drafts as before.
        """
        with self._busy:
            if self._due() or not self._ring.learnt:
                self._compare()
            return self._step() if self._ring.learnt else None

    @host_by_default
    def idle(self, seconds: float) -> None:
        """Learn for so long, or as long as there is something to learn."""
        with self._busy:
            self._learn(time.perf_counter() + seconds)

    def _bound(self) -> Student:
        if self._student is None:
            raise ValueError("This Learner has no head; call attach(model, head, learner=learner) first.")
        return self._student

    def keep(self, segment: Segment) -> None:
        """Keep some text of a call, if there is enough of it."""
        if len(segment) > self._bound().head.draft_length and not self.paused:
            self._ring.add(segment)
            self.stats.tokens += len(segment) - segment.prompt

    def served(self, seconds: float) -> None:
        """Learn after so many seconds of a call, as the share allows; an error pauses that, and the call goes on."""
        if self.paused:
            return
        self.stats.serving += seconds
        left = self.share * self.stats.serving - self.stats.seconds
        if left <= 0 or not self._busy.acquire(blocking=False):
            return
        try:
            self._learn(time.perf_counter() + left)
        except Exception as error:
            self._fail(error)
        finally:
            self._busy.release()

    def _fail(self, error: Exception) -> None:
        self.paused, self.failure = True, error
        told = f"Learning is paused, and the head drafts as before: {error!r:.300}; learner.resume() goes on."
        warnings.warn(told, stacklevel=3)

    def _learn(self, until: float) -> None:
        """Compare and take steps until then, as long as there is something to learn."""
        while time.perf_counter() < until:
            if self._due():
                self._compare()
                continue
            enough = self.stats.steps * _SPACING >= self.stats.tokens
            if enough or self.stats.learning_rate is None or not self._ring.learnt:
                return
            self._step()

    def _due(self) -> bool:
        """Return True if there is enough new text for a comparison."""
        few = self._bound().steps - self._compared < _FEW and self._ring.learnt
        return self._ring.waiting >= (_LONGER if few else 1) * _LESSON

    @contextmanager
    def _training(self) -> Iterator[Student]:
        """Count the time of what is done inside, which may be a call of `generate` in inference mode."""
        began = time.perf_counter()
        try:
            with torch.inference_mode(False):
                yield self._bound()
        finally:
            self.stats.seconds += time.perf_counter() - began

    def _step(self) -> float:
        with self._training() as student:
            loss = student.step(self._ring.draw(SEGMENTS, student.generator), self.learning_rates[self._rung])
            self.stats.steps += 1
            if not math.isfinite(loss):
                self._next_rate()
            return loss

    def _compare(self) -> None:
        """Let the better of the two heads draft, by the text that nothing was learnt from yet."""
        stats = self.stats
        with self._training() as student:
            if student.left != student.contents():  # others have trained the head
                self._student = Student(student.head)
                self._forget()
                return
            fresh = self._ring.take_fresh()
            stride = max(sum(map(len, fresh)) // _DRAFTS, 1)
            self._compared, moved = student.steps, student.steps > 0
            found = student.expected(fresh, stride, [student.frozen, student.learnt][: 1 + moved])
            if not found.shape[1]:
                return
            self._before.add(found[0])
            stats.tau_before = 1 + self._before.mean
            if moved:
                self._gain.add(found[1] - found[0])
                before, stats.learnt = stats.learnt, self._gain.errors > (0.0 if stats.learnt else _SURE)
                student.use(stats.learnt)
                if stats.learnt != before:
                    student.head._pace_records = None  # drafts are accepted as often as others
                self._missed = 0 if stats.learnt else self._missed + 1
                lost = self._gain.errors < _LOST or self._missed >= _PATIENCE
                if lost and not stats.learnt and student.steps >= _LEAST:
                    self._next_rate()
            elif stats.tokens >= self._wake or abs(stats.tau_before / self._level - 1) > _CHANGE:
                stats.learning_rate = self.learning_rates[self._rung]
            stats.tau_now = stats.tau_before + (self._gain.mean if stats.learnt else 0.0)

    def _next_rate(self) -> None:
        """Begin again with the next learning rate; after the last one, wait."""
        stats = self.stats
        self._bound().begin_again()
        self._bound().use(False)
        stats.learnt, stats.tau_now, self._gain, self._missed, self._compared = False, stats.tau_before, _Recent(), 0, 0
        self._rung = (self._rung + 1) % len(self.learning_rates)
        stats.learning_rate = self.learning_rates[self._rung]
        if self._rung == 0:
            stats.learning_rate, self._level = None, stats.tau_before
            self._wake, self._sleep = stats.tokens + self._sleep, 2 * self._sleep
