"""`Batcher`: requests that join and leave a running batch between its rounds, each with the text that it has alone."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Condition, Thread
from traceback import clear_frames
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.decoding.api import AttachedGenerate, broken_off_on_failure, close_call, open_request, requested
from hf_dart.decoding.feed import PromptReader, in_pieces
from hf_dart.decoding.request import Request
from hf_dart.decoding.seats import Seats
from hf_dart.decoding.session import Observer, Session, break_off
from hf_dart.decoding.stats import DraftStats
from hf_dart.drafters.base import Drafter
from hf_dart.drafters.compatibility import unwrapped
from hf_dart.drafters.lookup import LookupDrafter
from hf_dart.models.devices import autocast_dtype, device_of
from hf_dart.models.positions import positions_of_table
from hf_dart.models.trial import check_verification
from hf_dart.serve.handle import Handle
from hf_dart.serve.prefixes import Prefixes
from hf_dart.trees.config import TreeConfig

MAX_TOKENS = 65_536  # that the requests of a batcher may hold together, where nothing else is said
PREFIX_TOKENS = 8_192  # of shared beginnings that a batcher keeps, likewise
PIECE = 256  # tokens of prompts that are read between two rounds
_ALONE = 4  # pieces that are read at once where no request runs
_IDLE = 0.2  # seconds that the thread waits for a request, as a new one would allocate all of its memory again


@dataclass(eq=False)
class _Call:
    """A request, and its session once its prompt is read."""

    request: Request
    handle: Handle
    autocast: torch.dtype | None  # of the thread that submitted it
    session: Session | None = None


class Batcher:
    """Batch that requests join and leave between two rounds: `Batcher(model, head).submit(input_ids, seed=0)`.

    Each request writes the text that `torch.manual_seed(seed); model.generate(...)` writes for it alone, whatever
    joins, leaves, is cancelled or fails beside it (docs/exactness.md). The target verifies the drafts of
    all of them in one forward. Requests are served in the order in which they come: while the first that waits has no
    room, those after it wait, too. Prompts are read in pieces, with a round of the others in between.

    Rounds run on a thread of the batcher's own, which is there while there are requests, and a moment longer. Any
    thread may submit. torch's default generator is neither read nor moved: each request has a generator of its own.
    Change weights of the target while no request runs: those that come meanwhile do not look at them again.

    Args:
        model: the target: a causal LM, or a wrapper of one by PEFT or `torch.compile`.
        drafter: drafts for every request; None takes the default drafter of an attached model, or drafts nothing. The
            memory of an attached model (`attach(model, memory=)`) serves requests that name none.
        seats: requests that run at a time.
        max_tokens: tokens that they may hold together. Each takes as many as the longest of them may reach, its prompt
            and `max_new_tokens`.
        prefix_tokens: of beginnings that prompts share, such as system prompts, whose entries are kept for the next
            ones; 0 keeps none. What was not used for longest makes room.

    Raises:
        TypeError: `model` is no model, or `drafter` no drafter of ours.
        ValueError: the model cannot verify trees, the drafter was made for another one, or a bound is not positive.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter[Any] | None = None,
        *,
        seats: int = 8,
        max_tokens: int = MAX_TOKENS,
        prefix_tokens: int = PREFIX_TOKENS,
    ) -> None:
        bounds = {"seats": (seats, 1), "max_tokens": (max_tokens, 1), "prefix_tokens": (prefix_tokens, 0)}
        for name, (value, least) in bounds.items():
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r:.100}; give a number from {least} on.")
        self._model = unwrapped(model)
        attached = vars(self._model).get("generate")
        default, self._memory = None, None
        if isinstance(attached, AttachedGenerate):
            default, self._memory = attached.default, attached.memory
        self._nothing = LookupDrafter(TreeConfig(nodes=1, draft_cost=0.0))
        self._drafter = drafter or default or self._nothing
        check_verification(self._model)
        self.max_tokens, self._positions = max_tokens, positions_of_table(self._model)
        self._prefixes = Prefixes(prefix_tokens)
        self._seats = Seats(seats)
        self._waiting: deque[_Call] = deque()
        self._running: list[_Call] = []
        self._reading: _Call | None = None
        self._read = 0  # tokens of prompts that were read since the last round, where none is being read now
        self._changed = Condition()  # around all that submit, close and the thread share
        self._thread: Thread | None = None
        self._closed = False

    @property
    def device(self) -> torch.device:
        """Device of the target's prompts."""
        return device_of(self._model.get_input_embeddings())

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a seat."""
        with self._changed:
            return sum(not call.handle.cancelled() for call in self._waiting)

    @property
    def running(self) -> int:
        """Number of requests that are being read or written."""
        return len(self._running) + (self._reading is not None)

    @torch.inference_mode(False)  # the thread of the rounds writes to what is made here
    def submit(
        self,
        input_ids: Tensor | Sequence[int],
        generation_config: Any = None,
        *,
        seed: int | None = None,
        observers: Sequence[Observer] = (),
        **options: Any,
    ) -> Handle:
        """Ask for the text that `model.generate(input_ids, generation_config, **options)` writes.

        Args:
            input_ids: [1, P] or [P] token ids of one prompt.
            generation_config: as for `generate`.
            seed: of the tokens that are drawn: those of `torch.manual_seed(seed)`. None chooses one, which
                `Handle.seed` tells.
            observers: are told of what it commits, on the thread of the rounds, before its tokens are shown.
            options: all others of `generate`, such as `max_new_tokens`, `do_sample`, `logits_processor`,
                `stopping_criteria`, `stop_strings` with `tokenizer`, `memory`, `tree_config` and `assistant` (None
                drafts nothing). Processors and criteria run on the thread of the rounds; those that keep state between
                calls serve one request each. Requests of different tree configs or drafters, or submitted under
                another autocast, do not run at the same time; nor do any beside one that may go beyond a table of
                positions, as GPT-2 has one.

        Returns:
            The request, whose tokens and output come as they are known.

        Raises:
            RuntimeError: the batcher has been closed.
            TypeError, ValueError: the request was refused: for what `generate` refuses with a drafter; for several
                rows, or collected hidden states; or because it may hold more than `max_tokens`.
        """
        ids = self._row(input_ids)
        if options.get("attention_mask") is not None:
            options["attention_mask"] = self._row(options["attention_mask"])
        # Nothing of ours changes weights of the target while requests run: the first of them looks at their contents.
        overlaps = not all(call.handle.done() for call in self._calls())
        if not overlaps:
            self._prefixes.checked = False
        drafter = options.pop("assistant", self._drafter) or self._nothing
        options = {"memory": self._memory, **options}
        request = requested(self._model, ids, generation_config, assistant=drafter, overlaps=overlaps, **options)
        request = replace(request, observers=(*observers,))
        if request.most > self.max_tokens:
            raise ValueError(
                f"This request may hold {request.most} tokens, {request.total} of its prompt and the new ones, and "
                f"max_tokens is {self.max_tokens}; give a smaller max_new_tokens, or a Batcher with more of them."
            )
        handle = Handle(secrets.randbits(63) if seed is None else int(seed))
        with self._changed:
            if self._closed:
                raise RuntimeError("This Batcher has been closed; make another one.")
            # Those that were cancelled meanwhile make room, also behind others.
            self._waiting = deque(call for call in self._waiting if not call.handle.cancelled())
            self._waiting.append(_Call(request, handle, autocast_dtype(self.device)))
            self._changed.notify()
            if self._thread is None or not self._thread.is_alive():  # its start may have been interrupted
                self._thread = Thread(target=self._work, name="hf_dart.Batcher")
                self._thread.start()
        return handle

    def _row(self, values: Tensor | Sequence[int]) -> Tensor:
        """Return [P] or [1, P] numbers as a tensor [1, P]."""
        with suppress(RuntimeError, TypeError, ValueError):
            row = torch.as_tensor(values, device=None if isinstance(values, Tensor) else self.device)
            if row.ndim:
                return row[None] if row.ndim == 1 else row
        raise TypeError(f"A prompt is a row of token ids, not {values!r:.100}; give tokenizer(text)['input_ids'].")

    def close(self, cancel: bool = False) -> None:
        """Take no more requests, and return when all are done.

        Args:
            cancel: cancel those that are not done.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        for call in self._calls() if cancel else ():
            call.handle.cancel()
        if thread is not None and thread.is_alive():
            thread.join()

    def _calls(self) -> list[_Call]:
        """Return all requests that wait or run."""
        with self._changed:
            return [*self._waiting, *filter(None, [self._reading]), *self._running]  # as they go from one to the next

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close(cancel=kind is not None)

    # ---- on the thread of the rounds ----------------------------------------------------------------

    @torch.no_grad()
    def _work(self) -> None:
        """Run rounds while there are requests."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed, _IDLE)
                if not self._waiting:
                    self._thread = None
                    return
                autocast = self._waiting[0].autocast
            with torch.autocast(self.device.type, autocast, enabled=autocast is not None):
                self._work_under(autocast)

    def _work_under(self, autocast: torch.dtype | None) -> None:
        """Run rounds of requests that were submitted under one autocast, until none runs."""
        while True:
            while self._read < PIECE and (call := self._next(autocast)) is not None:
                self._begin(call)
            self._round()
            if not self._running:
                return

    def _next(self, autocast: torch.dtype | None) -> _Call | None:
        """Take the first request that waits, if there is room for it."""
        with self._changed:
            while self._waiting and self._waiting[0].handle.cancelled():
                self._waiting.popleft()
            if not self._waiting or self._waiting[0].autocast != autocast or not self._seats.free:
                return None
            calls = [self._waiting[0], *self._running]
            room = max(call.request.most for call in calls) * len(calls) <= self.max_tokens
            first, last = ((call.request.drafter, call.request.tree_config) for call in (calls[0], calls[-1]))
            alone = any(call.request.most - 1 > self._positions for call in calls)  # or the forward of all would fail
            if self._running and (alone or not (room and first == last)):
                return None
            self._reading = self._waiting.popleft()
            return self._reading

    def _begin(self, call: _Call) -> None:
        """Read the prompt of a request and let it take a seat."""
        others = DraftStats()

        def pause(reader: PromptReader) -> None:
            self._prefixes.keep(reader, call.request.drafter, shared)  # the reader's own may be a stand-in
            with others.phase("prefill"):
                self._round()
            self._read -= reader.read
            if call.handle.cancelled():
                raise CancelledError

        try:
            request, shared = self._prefixes.begin(call.request)
            self._read -= request.cached
            request = in_pieces(request, PIECE if self._running else _ALONE * PIECE, pause, shared)
            session = open_request(request, torch.Generator(request.input_ids.device).manual_seed(call.handle.seed))
            session.stats.add_times(others, -1.0)
            call.session, call.handle.stats = session, session.stats
            self._show(call)
            if session.rows.finished:
                self._end(call, None)
            else:
                self._seats.take(session)
                self._running.append(call)
        except BaseException as failure:
            self._end(call, failure)
        finally:
            self._reading = None
            self._read += call.request.total

    def _round(self) -> None:
        """Run a round of all requests that have a seat, and let those go that are done."""
        self._read, ended = 0, dict[int, BaseException | None]()
        try:
            for call in self._running:
                if call.handle.cancelled() and call.session is not None:
                    self._seats.leave(call.session)
                    ended[id(call.session)] = CancelledError()
            ended |= {id(session): failure for session, failure in self._seats.round()}
        except BaseException as failure:
            self._seats = Seats(self._seats.size)
            ended = {id(call.session): failure for call in self._running}
        for call in [*self._running]:
            self._show(call)
            if id(call.session) in ended:
                self._running.remove(call)
                self._end(call, ended[id(call.session)])

    def _show(self, call: _Call) -> None:
        """Show the tokens that are new."""
        assert call.session is not None
        rows, shown = call.session.rows, len(call.handle.tokens)
        new = rows.tokens[0][len(rows.tokens[0]) - rows.emitted[0] + shown :]
        if new:
            call.handle.put(new)

    def _end(self, call: _Call, failure: BaseException | None) -> None:
        """Hand out the output of a request, or the error that ended it."""
        output = None
        try:
            if call.session is not None and failure is None:
                with broken_off_on_failure(call.session):
                    output = close_call(call.session)
            elif call.session is not None:
                break_off(call.session)
        except BaseException as another:
            failure = failure or another
        if failure is not None:
            clear_frames(failure.__traceback__)  # whose variables are caches and activations of all that ran
        call.session = None  # whose request refers to the call by its `pause`
        call.handle.end(output, failure)
