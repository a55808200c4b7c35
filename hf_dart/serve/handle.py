"""`Handle`: the tokens of one request as they come, and its output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from threading import Condition
from typing import Any

from hf_dart.decoding.stats import DraftStats

_LOGGER = logging.getLogger(__name__)


class Handle(Future[Any]):
    """One request to a [`Batcher`]: a `concurrent.futures.Future` of its output, and an iterable of its tokens.

    `result(timeout=None)` waits and returns what `model.generate` returns for this request alone: token ids [1, P + T],
    or with `return_dict_in_generate=True` a [`DartGenerateOutput`]; it raises the error that ended the request.
    `cancel()` takes the request back at any time before its end: its seat is free before the next round. `done()`,
    `cancelled()`, `exception(timeout=None)` and `add_done_callback(function)` are those of every future, so that
    `asyncio.wrap_future` takes it, too. Callbacks run on the thread of the rounds, or on
    the one that cancels.

    Iterate over it for its tokens, each as soon as it is known: plain ints, from the first one after the prompt on. The
    iterator ends where the text does, and raises where `result` would. Each iterator begins at the first token.

    Attributes:
        seed: of the tokens that are drawn.
        tokens: generated so far; also those of a request that failed or was cancelled.
        stats: what was drafted so far, a [`DraftStats`]; None until the prompt has been read.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.tokens: list[int] = []
        self.stats: DraftStats | None = None
        self._news = Condition()
        self._cancelled = False
        self._told: list[Callable[[], object]] = []

    def __iter__(self) -> Iterator[int]:
        sent = 0
        while True:
            with self._news:
                while len(self.tokens) == sent and not self.done():
                    self._news.wait()
                new = self.tokens[sent:]
            if not new:
                self.result()
                return
            sent += len(new)
            yield from new

    def add_news_callback(self, function: Callable[[], object]) -> None:
        """Call a function now, whenever there are new tokens, and at the end, on the thread that has them."""
        self._told.append(function)
        function()

    def put(self, tokens: list[int]) -> None:
        """Show these tokens, and wake whoever waits. For the [`Batcher`] alone, as is `end`."""
        with self._news:
            self.tokens += tokens
            self._news.notify_all()
        for function in [*self._told]:
            try:
                function()
            except Exception:  # the loop that it calls may be closed
                self._told = [one for one in self._told if one is not function]
                _LOGGER.exception("A callback of a request failed, and is not called again.")

    def end(self, output: Any, failure: BaseException | None = None) -> None:
        """Set the output, or the error that ended the request, unless it has been cancelled meanwhile."""
        try:
            if failure is None:
                self.set_result(output)
            else:
                self.set_exception(failure)
        except InvalidStateError:
            assert self.cancelled()
        self.put([])

    def cancel(self) -> bool:
        """Take the request back, if it has not ended; return whether it is cancelled."""
        cancelled = super().cancel()
        with self._news:
            first, self._cancelled = cancelled and not self._cancelled, cancelled
        if first:
            self.set_running_or_notify_cancel()  # or `concurrent.futures.wait` would wait on
        self.put([])
        return cancelled
