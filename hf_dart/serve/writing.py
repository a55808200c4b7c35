"""`Texts`: the texts of one request as they are written, from the batcher's thread to the event loop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from starlette.requests import ClientDisconnect, Request
from torch import Tensor

from hf_dart.decoding.processors import AdditivePenaltyLogitsProcessor
from hf_dart.decoding.session import Observer
from hf_dart.drafters.base import Verified
from hf_dart.errors import sentence
from hf_dart.serve.detokenizer import Detokenizer
from hf_dart.serve.parameters import Asked, CompletionAsked, Refusal
from hf_dart.serve.service import Service
from hf_dart.serve.tools import Call, Reader


class TokenLogprob(NamedTuple):
    """A token, its log-probability before temperature and the like, and the likeliest tokens in its place."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Piece:
    """Additions to one text, and how it ends: "stop", "length", or "tool_calls" where it stops and has some."""

    index: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    calls: tuple[Call, ...] = ()
    end: str | None = None

    def __or__(self, more: Piece) -> Piece:
        """Return this piece and one that follows as one."""
        text, logprobs, calls = self.text + more.text, self.logprobs + more.logprobs, self.calls + more.calls
        return Piece(self.index, text, logprobs, calls, more.end or self.end)


class _Text(Observer):
    """One text: its call, which tells it of log-probabilities where they are asked for, and how far it has come."""

    def __init__(
        self, service: Service, asked: Asked, grammar: Any, ids: list[int], seed: int, options: dict[str, Any]
    ) -> None:
        penalties = asked.presence_penalty or 0.0, asked.frequency_penalty or 0.0
        processors: list[Any] = [AdditivePenaltyLogitsProcessor(len(ids), *penalties)] if any(penalties) else []
        if grammar is not None:
            from xgrammar.contrib.hf import LogitsProcessor

            processors.append(LogitsProcessor(grammar))
        options = {**options, "logits_processor": processors}
        self._service, self._top, self._logprobs = service, asked.top, list[TokenLogprob]()
        before = ids if isinstance(asked, CompletionAsked) else ()
        self._detokenizer = Detokenizer(service.tokenizer, asked.stop, bool(asked.functions), before)
        self._reader = Reader(asked, service.tokenizer, service.model, ids)
        self.tokens, self.end, self._most = 0, "", options["max_new_tokens"]
        given = torch.tensor([ids], device=service.batcher.device)
        options |= {"attention_mask": torch.ones_like(given), "tokenizer": service.tokenizer}
        observers = () if asked.top is None else (self,)
        self.handle = service.batcher.submit(given, seed=seed, observers=observers, **options)

    def verified(self, seen: Verified, logits: Callable[[], Tensor] | None) -> None:
        """See `hf_dart.decoding.session.Observer`."""
        if logits is None:
            return
        count = int(seen.counts)
        tokens = seen.next_tokens[0, :count].tolist()
        for token, scores in zip(tokens, logits()[0, :count].float().log_softmax(-1), strict=True):
            best = scores.topk(min(self._top, len(scores)))
            top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            self._logprobs.append(TokenLogprob(token, float(scores[token]), top))

    def piece(self, index: int) -> Piece:
        """Return what is new; raises what ended the call, if that is an error."""
        if self.end:
            return Piece(index)
        done, first, said = self.handle.done(), self.tokens, Piece(index)
        for token in self.handle.tokens[first:]:
            self.tokens += 1
            self._service.metrics.written.inc()
            if token not in self._service.ends:
                said |= self._read(self._detokenizer.add(token))
            if self._detokenizer.stopped or self._reader.full:
                self.end = "stop"
                self.handle.cancel()
                break
        cut = self._service.ends.isdisjoint(self.handle.tokens[self.tokens - 1 : self.tokens])
        if done and not self.end:
            self.handle.result()
            self.end = "length" if cut and self.tokens == self._most else "stop"
        if self.end:
            said |= self._read(self._detokenizer.end(), last=True, cut=cut)
        end = "tool_calls" if self.end == "stop" and self._reader.calls else self.end
        return said | Piece(index, logprobs=tuple(self._logprobs[first : self.tokens]), end=end or None)

    def _read(self, text: str, last: bool = False, cut: bool = False) -> Piece:
        text, calls = self._reader.add(text, last, cut)
        return Piece(0, text, calls=calls)


class Texts:
    """Texts of one request whose body has been read: `begin`, then `pieces`, then `close`, whatever happens.

    `prompts` and `options` are those that `Service.read` returns.
    """

    def __init__(
        self, service: Service, asked: Asked, prompts: list[Any], options: list[Any], request: Request
    ) -> None:
        self._service, self._asked, self._request = service, asked, request
        self._prompts, self._options, self._texts = prompts, options, list[_Text]()
        self.size = len(prompts) * (asked.n or 1)
        service.refuse_if_full(self.size)
        service.taken += self.size
        self._seed = secrets.randbits(31) if asked.seed is None else asked.seed
        self._begun, self._news, self._gone = perf_counter(), asyncio.Event(), False
        self._first: float | None = None
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + service.limits.timeout
        self._watcher = loop.create_task(self._watch())

    @property
    def usage(self) -> tuple[int, int]:
        """Numbers of tokens of the prompts, and of the texts so far."""
        return sum(map(len, self._prompts)), sum(text.tokens for text in self._texts)

    async def begin(self) -> None:
        """Hand the texts to the batcher, and wait for a token; raise a `Refusal`, or `ClientDisconnect`."""
        service, loop = self._service, asyncio.get_running_loop()
        grammar = None
        if self._asked.masked:
            grammar = await self._in_time(loop.run_in_executor(service.compiler, service.grammar, self._asked))
        await loop.run_in_executor(service.reader, self._submit, loop, grammar)
        while not any(text.handle.tokens or text.handle.done() for text in self._texts):
            await self._wait()
        if any(text.handle.tokens for text in self._texts):
            self._first = perf_counter() - self._begun
        self._news.set()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the texts as they grow; errors are those of `begin`."""
        while not all(text.end for text in self._texts):
            await self._wait()
            for number, text in enumerate(self._texts):
                try:
                    piece = text.piece(number)
                except ValueError as error:
                    raise Refusal(sentence(error)) from error
                except CancelledError as error:
                    raise Refusal("The server stops; ask again when it is back.", status=503) from error
                if piece != Piece(number):
                    yield piece

    async def _wait(self) -> None:
        """Wait for news of a text, or of the end of all."""
        await self._in_time(self._news.wait())
        self._news.clear()
        if self._gone:
            raise ClientDisconnect

    async def _in_time(self, awaited: Awaitable[Any]) -> Any:
        """Wait for something until the time of the answer is over; return what it gives."""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await awaited
        except TimeoutError:
            what = "fewer tokens, or a simpler schema" if self._asked.masked else "fewer tokens"
            late = f"The answer took more than {self._service.limits.timeout:g} s; ask for {what}."
            raise Refusal(late, status=504) from None

    def close(self) -> None:
        """End what still runs, free the places, and note what became of the request; once."""
        self._watcher.cancel()
        service, prompt_tokens, tokens = self._service, *self.usage
        service.taken -= self.size
        ends = [text.end or "abort" for text in self._texts]
        service.metrics.ended(prompt_tokens, self._first, perf_counter() - self._begun, ends)
        for text in self._texts:
            text.handle.cancel()
            if text.handle.stats is not None:
                service.metrics.drafted(text.handle.stats)
        first = "" if self._first is None else f", the first after {self._first:.3f} s"
        note = f"{prompt_tokens} + {tokens} tokens{first}, {'/'.join(sorted(set(ends)))}, seed {self._seed}"
        self._request.state.note = note

    def _submit(self, loop: asyncio.AbstractEventLoop, grammar: Any) -> None:
        """Hand all texts to the batcher; those after the first of a prompt have the seeds after its."""
        try:
            for ids, options in zip(self._prompts, self._options, strict=True):
                for count in range(self._asked.n or 1):
                    text = _Text(self._service, self._asked, grammar, ids, self._seed + count, options)
                    self._texts.append(text)
                    text.handle.add_news_callback(partial(loop.call_soon_threadsafe, self._news.set))
        except (TypeError, ValueError) as error:
            raise Refusal(sentence(error)) from error

    async def _watch(self) -> None:
        """Tell `_wait` when the client leaves, which ends all."""
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._news.set()
