"""Raw documents (text, token ids, conversations) to token ids, and which of them a head may be trained to draft."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_dart.training.data.chat import ChatFormat, Message, as_messages
from hf_dart.training.data.packing import Document, Packer


@dataclass(frozen=True)
class Encoder:
    """Raw documents to packed rows.

    Args:
        kind: "input_ids", "messages", "completion" (text after a prompt) or "text".
        columns: the field that holds it, and others that are read.
        tokenizer: the target's.
        chat: how conversations become text; None where there are none.
        all_tokens: train on everything, not only on what the assistant or the target wrote.
        pack: documents to rows.
        source: for messages.
    """

    kind: str
    columns: Sequence[str]
    tokenizer: Any
    chat: ChatFormat | None
    all_tokens: bool
    pack: Packer
    source: str

    @property
    def name(self) -> str:
        """The field that holds the documents."""
        return self.columns[0]

    def __call__(self, examples: dict[str, list[Any]]) -> dict[str, list[np.ndarray]]:
        """Columns of documents to columns of rows."""
        return self.pack(self.encode(examples))

    def encode(self, examples: dict[str, list[Any]]) -> list[Document]:
        """The documents of a batch, as token ids and which of them may be drafted.

        Raises:
            ValueError: a field does not hold what its name says, or ids lie outside the vocabulary.
        """
        ways = {
            "text": self._encode_text,
            "completion": self._encode_completions,
            "input_ids": self._encode_ids,
            "messages": self._encode_messages,
        }
        documents = ways[self.kind](examples)
        if self.all_tokens:
            documents = [(ids, np.ones_like(mask)) for ids, mask in documents]
        return documents

    def _encode_text(self, examples: dict[str, list[Any]]) -> list[Document]:
        texts = [text for text in self._texts(examples, self.name) if text]
        documents = []
        for ids in self.tokenizer(texts, verbose=False)["input_ids"] if texts else []:
            ids = self._ended(ids)
            documents.append((np.array(ids, np.int32), np.ones(len(ids), bool)))
        return documents

    def _encode_completions(self, examples: dict[str, list[Any]]) -> list[Document]:
        documents = []
        texts = (self._texts(examples, name) for name in ("prompt", self.name))
        for prompt, completion in zip(*texts, strict=True):
            if completion:
                given = self.tokenizer(prompt or "", verbose=False)["input_ids"]
                written = self.tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"]
                ids = self._ended([*given, *written])
                documents.append((np.array(ids, np.int32), np.arange(len(ids)) >= len(given)))
        return documents

    def _texts(self, examples: dict[str, list[Any]], name: str) -> list[str | None]:
        texts = examples[name]
        wrong = next((text for text in texts if text is not None and not isinstance(text, str)), None)
        if wrong is not None:
            raise ValueError(
                f"The field {name!r} of {self.source} holds {type(wrong).__name__}, not text; name the field "
                "that holds the text with text_field."
            )
        return texts

    def _ended(self, ids: list[int]) -> list[int]:
        """With the token that ends a text."""
        eos = self.tokenizer.eos_token_id
        return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]

    def _encode_ids(self, examples: dict[str, list[Any]]) -> list[Document]:
        prompts = examples.get("prompt_tokens", [0] * len(examples[self.name]))
        documents = []
        for row, prompt in zip(examples[self.name], prompts, strict=True):
            ids = self._ids(row)
            given = 0 if prompt is None else prompt
            if type(given) is not int or given < 0:
                raise ValueError(
                    f"The field 'prompt_tokens' of {self.source} holds {prompt!r}; give how many of the row's tokens "
                    "the target did not write."
                )
            documents.append((ids, np.arange(len(ids)) >= given))
        return documents

    def _ids(self, row: Any) -> np.ndarray:
        """The token ids [n] int32 of a row."""
        try:
            ids = np.array([] if row is None else row)
        except (ValueError, OverflowError):  # lists of several lengths, numbers beyond 64 bits
            ids = np.array(None)
        if ids.shape == (0,):
            return ids.astype(np.int32)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"The field {self.name!r} of {self.source} holds something else than lists of token ids; fix it, or "
                "name the field that holds the text with text_field."
            )
        size = len(self.tokenizer)
        wrong = ids[(ids < 0) | (ids >= size)].tolist()
        if wrong:
            raise ValueError(
                f"{self.source} holds the token id {max(wrong, key=abs)}, outside this tokenizer's {size}; it was "
                "written with another tokenizer, or is no list of token ids."
            )
        return ids.astype(np.int32)

    def _encode_messages(self, examples: dict[str, list[Any]]) -> list[Document]:
        assert self.chat is not None
        documents = []
        for messages, tools in self.conversations(examples):
            with self._named():
                documents += self.chat.encode(messages, tools, marked=not self.all_tokens)
        return documents

    def conversations(self, examples: dict[str, list[Any]]) -> list[tuple[list[Message], Any]]:
        """The messages and tools of a batch.

        Raises:
            ValueError: the field holds something else.
        """
        size = len(examples[self.name])
        prompts, tools = examples.get("prompt", [[]] * size), examples.get("tools", [None] * size)
        found = []
        for before, turns, row_tools in zip(prompts, examples[self.name], tools, strict=True):
            if isinstance(before, list) and isinstance(turns, list):
                turns = [*before, *turns]
            if turns is not None and not (isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)):
                raise ValueError(
                    f"The field {self.name!r} of {self.source} holds no messages (dicts with 'role' and 'content'); "
                    "name the field that holds them with messages_field, or the text with text_field."
                )
            if turns:
                if isinstance(row_tools, str):  # as many datasets keep them
                    row_tools = self._tools(row_tools)
                with self._named():
                    found.append((as_messages(turns), row_tools or None))
        return found

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"A conversation of {self.source}: {error}") from error

    def _tools(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"The field 'tools' of {self.source} holds text that is not JSON ({error}).") from error
