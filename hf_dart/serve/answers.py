"""Answers as OpenAI's clients read them: whole, or as the events of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import Any

from hf_dart.serve.parameters import Refusal
from hf_dart.serve.writing import Piece, Texts


class Completion:
    """Answer to `POST /v1/completions`, of the texts that are written for it."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, asked: Any, texts: Texts, model: str, tokenizer: Any) -> None:
        self._asked, self._texts, self._decode = asked, texts, tokenizer.decode
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._offsets = [0] * texts.size  # characters whose log-probabilities are told

    async def whole(self) -> dict[str, Any]:
        """Wait for the end, and return the answer."""
        wholes = [self.opening(number) for number in range(self._texts.size)]
        async for piece in self._texts.pieces():
            wholes[piece.index] |= piece
        return {**self._head, "object": self.kind, "choices": [*map(self.choice, wholes)], "usage": self._usage}

    async def events(self) -> AsyncIterator[str]:
        """Yield an event for each piece, and the usage where it was asked for."""
        counts = self._asked.stream_options is not None and self._asked.stream_options.include_usage
        head = {**self._head, "object": self.chunk_kind} | ({"usage": None} if counts else {})
        for number in range(self._texts.size):
            yield _event({**head, "choices": [self.change(self.opening(number), first=True)]})
        async for piece in self._texts.pieces():
            yield _event({**head, "choices": [self.change(piece)]})
        if counts:
            yield _event({**head, "choices": [], "usage": self._usage})
        yield "data: [DONE]\n\n"

    def failed(self, refusal: Refusal) -> str:
        """Return the event of a stream that ends with an error."""
        return _event({"error": refusal.error})

    def opening(self, number: int) -> Piece:
        """Return what comes before a text."""
        echoed = self._asked.prompt[number // (self._asked.n or 1)] if self._asked.echo else ""
        return Piece(number, echoed if isinstance(echoed, str) else self._decode(echoed))

    def choice(self, piece: Piece) -> dict[str, Any]:
        """Return a text with its log-probabilities."""
        told = None
        if self._asked.logprobs is not None:
            tokens = [self._decode([one.token]) for one in piece.logprobs]
            *offsets, self._offsets[piece.index] = accumulate(map(len, tokens), initial=self._offsets[piece.index])
            told = {
                "tokens": tokens,
                "token_logprobs": [one.logprob for one in piece.logprobs],
                "top_logprobs": [self._top(one.top) for one in piece.logprobs],
                "text_offset": offsets,
            }
        return {"index": piece.index, "text": piece.text, "logprobs": told, "finish_reason": piece.end}

    def _top(self, scored: Iterable[tuple[int, float]]) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, value in scored:  # parts of a character may decode alike, of which the best counts
            top.setdefault(self._decode([token]), value)
        return top

    def change(self, piece: Piece, first: bool = False) -> dict[str, Any]:
        """Return what a stream tells of a piece."""
        return self.choice(piece)

    @property
    def _usage(self) -> dict[str, int]:
        prompt, written = self._texts.usage
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


class Chat(Completion):
    """Answer to `POST /v1/chat/completions`."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, number: int) -> Piece:
        return Piece(number)

    def choice(self, piece: Piece) -> dict[str, Any]:
        said = {"role": "assistant", "content": piece.text or (None if piece.calls else ""), "refusal": None}
        calls = [{name: value for name, value in one.items() if name != "index"} for one in _calls(piece)]
        return self._of(piece, "message", said | ({"tool_calls": calls} if calls else {}))

    def change(self, piece: Piece, first: bool = False) -> dict[str, Any]:
        said = ({"role": "assistant"} if first else {}) | {"content": piece.text}
        return self._of(piece, "delta", said | ({"tool_calls": _calls(piece)} if piece.calls else {}))

    def _of(self, piece: Piece, name: str, said: dict[str, Any]) -> dict[str, Any]:
        told = None
        if piece.logprobs:
            tops = [[*map(self._token, one.top)] for one in piece.logprobs]
            tokens = [self._token((one.token, one.logprob)) for one in piece.logprobs]
            told = {"content": [{**one, "top_logprobs": top} for one, top in zip(tokens, tops, strict=True)]}
        return {"index": piece.index, name: said, "logprobs": told, "finish_reason": piece.end}

    def _token(self, scored: tuple[int, float]) -> dict[str, Any]:
        text = self._decode([scored[0]])
        return {"token": text, "logprob": scored[1], "bytes": None if "\ufffd" in text else [*text.encode()]}


def _calls(piece: Piece) -> list[dict[str, Any]]:
    return [
        {"index": number, "id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
        for number, name, function, arguments in piece.calls
    ]


class Response:
    """Answer to `POST /v1/responses`: one message of one part, then calls; methods are those of `Completion`."""

    def __init__(self, asked: Any, texts: Texts, model: str, tokenizer: Any) -> None:
        self._texts, self._number = texts, -1
        self._item = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        self._head = {
            **{"id": f"resp_{secrets.token_hex(12)}", "object": "response", "created_at": int(time.time())},
            **{"model": model, "error": None, "tool_choice": asked.tool_choice, "parallel_tool_calls": asked.parallel},
            "tools": [{"type": "function", "strict": True, **tool["function"]} for tool in asked.functions],
            **asked.model_dump(include={"instructions", "max_output_tokens", "temperature", "top_p"}),
        }

    async def whole(self) -> dict[str, Any]:
        return self._of(reduce(or_, [piece async for piece in self._texts.pieces()], Piece(0)))

    async def events(self) -> AsyncIterator[str]:
        place = {"item_id": self._item["id"], "output_index": 0, "content_index": 0}
        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        item = {**self._item, "status": "in_progress", "content": []}
        yield self._told("response.created", response=begun)
        yield self._told("response.in_progress", response=begun)
        whole = Piece(0)
        async for piece in self._texts.pieces():
            if piece.text and not whole.text:
                yield self._told("response.output_item.added", output_index=0, item=item)
                yield self._told("response.content_part.added", **place, part=_part(""))
            whole |= piece
            if piece.text:
                yield self._told("response.output_text.delta", **place, delta=piece.text, logprobs=[])
        answer = self._of(whole)
        for number, item in enumerate(answer["output"]):
            place = {"item_id": item["id"], "output_index": number}
            if item["type"] == "message":
                yield self._told("response.output_text.done", **place, content_index=0, text=whole.text, logprobs=[])
                yield self._told("response.content_part.done", **place, content_index=0, part=_part(whole.text))
            else:
                called = {name: item[name] for name in ("name", "arguments")}
                yield self._told("response.output_item.added", output_index=number, item={**item, "arguments": ""})
                yield self._told("response.function_call_arguments.delta", **place, delta=item["arguments"])
                yield self._told("response.function_call_arguments.done", **place, **called)
            yield self._told("response.output_item.done", output_index=number, item=item)
        yield self._told(f"response.{answer['status']}", response=answer)

    def failed(self, refusal: Refusal) -> str:
        return self._told("error", **{name: refusal.error[name] for name in ("message", "param", "code")})

    def _told(self, kind: str, **content: Any) -> str:
        self._number += 1
        return f"event: {kind}\n" + _event({"type": kind, "sequence_number": self._number, **content})

    def _of(self, whole: Piece) -> dict[str, Any]:
        status, (prompt, written) = "incomplete" if whole.end == "length" else "completed", self._texts.usage
        message = {**self._item, "status": status, "content": [_part(whole.text)]}
        calls = [
            {"id": f"fc_{one.id}", "type": "function_call", "status": "completed", "call_id": one.id}
            | {"name": one.name, "arguments": one.arguments}
            for one in whole.calls
        ]
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [message, *calls] if whole.text else calls,
            "usage": {"input_tokens": prompt, "output_tokens": written, "total_tokens": prompt + written, **details},
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"  # in ASCII: some clients end lines at other characters, too
