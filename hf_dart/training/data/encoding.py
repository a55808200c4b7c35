"""Raw documents (text, token ids, conversations) to token ids, and which of them a head may be trained to draft."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_dart.training.data.chat import ChatFormat, Message, as_messages
from hf_dart.training.data.packing import Document, Packer


@dataclass(frozen=True)
class Encoder:
    """Raw documents to packed rows, which are cached under all of these fields."""

    kind: str  # "input_ids", "messages", "completion" (text after a prompt) or "text"
    columns: Sequence[str]  # the field that holds it, and others that are read
    tokenizer: Any
    chat: ChatFormat | None  # how conversations become text
    all_tokens: bool  # train on everything, not only on what the assistant or the target wrote
    pack: Packer
    source: str  # for messages
    version: str  # of this package

    @property
    def name(self) -> str:
        """The field that holds the documents."""
        return self.columns[0]

    def __call__(self, examples: dict[str, list[Any]]) -> dict[str, list[np.ndarray]]:
        """Columns of documents to columns of rows."""
        return self.pack(self.encode(examples))

    def encode(self, examples: dict[str, list[Any]]) -> list[Document]:
        """Return the documents of a batch, as token ids and which of them may be drafted."""
        documents = list(getattr(self, f"_encode_{self.kind}")(examples))
        return [(ids, np.ones_like(mask)) for ids, mask in documents] if self.all_tokens else documents

    def _encode_text(self, examples: dict[str, list[Any]]) -> Iterator[Document]:
        texts = [text for text in self._texts(examples, self.name) if text]
        for ids in self.tokenizer(texts, verbose=False)["input_ids"] if texts else []:
            yield self._ended(ids, 0)

    def _encode_completion(self, examples: dict[str, list[Any]]) -> Iterator[Document]:
        texts = (self._texts(examples, name) for name in ("prompt", self.name))
        for prompt, completion in zip(*texts, strict=True):
            if completion:
                given = self.tokenizer(prompt or "", verbose=False)["input_ids"]
                written = self.tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"]
                yield self._ended([*given, *written], len(given))

    def _texts(self, examples: dict[str, list[Any]], name: str) -> list[str | None]:
        for text in examples[name]:
            if text is not None and not isinstance(text, str):
                held = type(text).__name__
                raise ValueError(f"{self.source} holds {held} in {name!r}, not text; name the text with text_field.")
        return examples[name]

    def _ended(self, ids: list[int], given: int) -> Document:
        """Ids with the token that ends a text, all but the first `given` of them to be drafted."""
        eos = self.tokenizer.eos_token_id
        ended = np.array(ids if eos is None or ids[-1:] == [eos] else [*ids, eos], np.int32)
        return ended, np.arange(len(ended)) >= given

    def _encode_input_ids(self, examples: dict[str, list[Any]]) -> Iterator[Document]:
        known = len(self.tokenizer)
        prompts = examples.get("prompt_tokens", [0] * len(examples[self.name]))
        for row, given in zip(examples[self.name], prompts, strict=True):
            try:
                ids = np.array([] if row is None else row)
                fits = not len(ids) or (ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < known)
            except (ValueError, TypeError, OverflowError):  # no list, lists of several lengths, numbers beyond 64 bits
                fits = False
            if not fits or ids.ndim != 1 or not isinstance(given, int | None):
                raise ValueError(
                    f"A row of {self.source} has {row!r:.40} as {self.name!r} and {given!r:.20} as 'prompt_tokens'; "
                    f"give ids of this tokenizer's {known} tokens and how many of them the target did not write, or "
                    "name the field that holds the text with text_field."
                )
            yield ids.astype(np.int32), np.arange(len(ids)) >= (given or 0)

    def _encode_messages(self, examples: dict[str, list[Any]]) -> Iterator[Document]:
        assert self.chat is not None
        for messages, tools in self.conversations(examples):
            try:
                yield from self.chat.encode(messages, tools, marked=not self.all_tokens)
            except ValueError as error:
                raise ValueError(f"A conversation of {self.source}: {error}") from error

    def conversations(self, examples: dict[str, list[Any]]) -> list[tuple[list[Message], Any]]:
        """Return the messages and tools of a batch."""
        size = len(examples[self.name])
        prompts, tools = examples.get("prompt", [[]] * size), examples.get("tools", [None] * size)
        found = []
        for before, turns, own_tools in zip(prompts, examples[self.name], tools, strict=True):
            if isinstance(before, list) and isinstance(turns, list):
                turns = [*before, *turns]
            try:
                if isinstance(own_tools, str):  # as many datasets keep them
                    own_tools = json.loads(own_tools)
                if turns:
                    found.append((as_messages(turns), own_tools or None))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"A conversation of {self.source} in {self.name!r}: {error}") from error
        return found
