"""Calls of functions in texts: the form that a grammar holds them to, and the reader that finds them."""

from __future__ import annotations

import json
import secrets
from functools import partial
from typing import Any, NamedTuple

from hf_dart.serve.parameters import Asked, Refusal

_BEGIN, _END = "<tool_call>", "</tool_call>"
_READ = {"content", "tool_calls"}
_CALL = {"type": "function", "function": "{content}"}
_FORM: dict[str, Any] = {
    "start_anchor": _BEGIN,
    "fields": {"tool_calls": {"open": _BEGIN, "close": _END, "repeats": True, "content": "json", "transform": _CALL}},
}
"""Form of calls that have to be made, that of Hermes and Qwen, as transformers' parser of answers reads it."""


class Call(NamedTuple):
    """A call of a function: its number in the text, its id, and its arguments as JSON."""

    number: int
    id: str
    name: str
    arguments: str


def grammar_of(asked: Asked, xgrammar: Any) -> dict[str, Any]:
    """Return the structural tag (xgrammar) of a text that calls functions, each with arguments of its schema."""
    tags = []
    for tool in asked.forced:
        function = tool["function"]
        schema = json.dumps(function.get("parameters", {"type": "object", "properties": {}}))
        arguments = {"type": "grammar", "grammar": str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False))}
        begin = _BEGIN + '\n{"name": "' + function["name"] + '", "arguments": '
        tags.append({"type": "tag", "begin": begin, "content": arguments, "end": "}\n" + _END})
    calls = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
    return {"type": "structural_tag", "format": {**calls, "stop_after_first": not asked.parallel}}


class Reader:
    """Reader of one text as it comes, which tells calls of functions, `calls` so far, from the rest.

    Raises a `Refusal` where nothing says what a call looks like in such a text.
    """

    def __init__(self, asked: Asked, tokenizer: Any, model: Any, prompt: list[int]) -> None:
        self.calls, self._held, self._most = 0, "", None if asked.parallel else 1
        self._forced = bool(asked.forced)
        self._parser: Any = None
        if not asked.functions:
            return
        from transformers.cli.serving.utils import get_response_template, response_events_to_chunks
        from transformers.utils.chat_parsing import ResponseParser

        template = _FORM if asked.forced else get_response_template(tokenizer, model)
        if template is None:
            message = "The tokenizer has no response_template, which says what a call looks like"
            raise Refusal(f'{message}; give tool_choice "required", "none" or a function.', "tool_choice")
        # Others are thoughts, where no call is one; a closing word alone tells at once where they end.
        fields = {key: one for key, one in template["fields"].items() if key in _READ or type(one.get("close")) is str}
        self._begin = partial(ResponseParser, {**template, "fields": fields}, tools=asked.functions)
        # A thought may begin at the prompt's end; what else that ends with is no part of the text.
        end = tokenizer.decode(prompt[-32:]).rstrip()
        opens = (one["open"] for key, one in fields.items() if key not in _READ and "open" in one)
        words = [word for given in opens for word in ([given] if isinstance(given, str) else given)]
        self._parser = self._begin(next((word for word in words if end.endswith(word.rstrip())), ""))
        self._items = response_events_to_chunks

    @property
    def full(self) -> bool:
        """True if no more calls are wanted, so that the text may end."""
        return self.calls == self._most

    def add(self, text: str, last: bool = False, cut: bool = False) -> tuple[str, tuple[Call, ...]]:
        """Return the text and the calls that are certain now; one that cannot be read, or that is `cut`, is text."""
        if self._parser is None:
            return text, ()
        shown, calls = "", list[Call]()
        mark = "\0" if cut and not self.full else ""  # after which a call goes on only if its own end has not come
        for part in [*text, *mark, ""] if last else text:  # character by character, and the end
            if self.full:
                break
            self._held += part
            try:
                events = self._parser.feed(part) if part else self._parser.finalize()[1]
                seen = {event["field"] for event in events}
                if seen - _READ or (cut and not part and "tool_calls" in seen):  # shown as it stands
                    events, shown, self._held = [], shown + self._held, ""
                for item in self._items(events):
                    if isinstance(item, str):
                        shown, self._held = shown + item, self._held.removeprefix(item)
                    else:  # ids of nine letters, as some chat templates ask for
                        calls.append(Call(self.calls, secrets.token_hex(5)[1:], item.name, item.arguments))
                        self.calls, self._held = self.calls + 1, ""
            except (KeyError, TypeError, ValueError):  # of one call: those after it are read
                self._parser, shown, self._held = self._begin(""), shown + self._held, ""
        # The beginning of a call's first word, which no other field of `_FORM` takes.
        return (shown + (self._held if last and self._forced else "")).removesuffix(mark), (*calls,)
