"""Conversations to token ids, and which of the tokens the assistant wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hf_dart.errors import sentence
from hf_dart.training.data.packing import Document

Message = dict[str, Any]

# ShareGPT's names for the fields and roles of a message.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}


def as_messages(turns: Any) -> list[Message]:
    """Messages with `role` and `content`, also of ShareGPT's `from` and `value`; fields without a value go."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("These are no messages (dicts with 'role' and 'content'); name their field by messages_field.")
    messages = []
    for turn in turns:
        message = {name: value for name, value in turn.items() if value is not None}
        if "role" not in message and "from" in message:
            message = {"role": message.pop("from"), "content": message.pop("value", ""), **message}
            message["role"] = _ROLES.get(str(message["role"]), message["role"])
        if not isinstance(message.get("role"), str):
            raise ValueError(f"A message has the fields {sorted(message)}; give 'role', in text, and 'content'.")
        messages.append(message)
    return messages


def apply_template(tokenizer: Any, messages: list[Message], **options: Any) -> Any:
    """Call `tokenizer.apply_chat_template`; raise a `ValueError` where the template does not take these messages."""
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # a template is a program
        roles = " ".join(", ".join(dict.fromkeys(str(message["role"]) for message in messages)).split())
        why = f"{roles} ({sentence(error).rstrip('.')})"
        raise ValueError(f"The chat template does not take messages of {why}; mend it, or leave such out.") from error


@dataclass(frozen=True)
class ChatFormat:
    """Rendering of conversations as text, and of text as token ids."""

    tokenizer: Any  # a fast one
    template: str | None = None  # instead of the tokenizer's own
    enable_thinking: bool | None = None  # handed to the template; None leaves it out

    def __post_init__(self) -> None:
        if not (self.template or self.tokenizer.chat_template):
            raise ValueError("The tokenizer has no chat template; set its chat_template, or give --chat-template.")

    @property
    def template_text(self) -> str:
        """The template that is used."""
        return self.tokenizer.get_chat_template(self.template)

    def render(self, messages: list[Message], prompt: bool = False, tools: Any = None) -> str:
        """Return the text of `messages`, with `prompt` up to where the assistant begins to write."""
        return self._apply(messages, tokenize=False, add_generation_prompt=prompt, tools=tools)

    def encode(self, messages: list[Message], tools: Any = None, marked: bool = True) -> list[Document]:
        """Token ids [n] of the conversation, and bool [n], which of them the assistant wrote; not `marked`, all False.

        A template with `{% generation %}` marks its text itself. Otherwise an assistant's turn is what a rendering
        up to its end adds to the rendering up to its start, as far as the end token. Where later turns change how
        earlier ones are rendered (templates that drop past thoughts), there is one document for each assistant's
        turn, rendered up to its end as the model meets it, and only that turn is marked in it.
        """
        template = self.tokenizer.get_chat_template(self.template, tools)
        if marked and re.search(r"\{%-?\s*generation\s*-?%\}", template):
            asked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
            found = self._apply(messages, tools=tools, **asked)
            return [(np.array(found["input_ids"], np.int32), np.array(found["assistant_masks"], bool))]
        render = partial(self.render, tools=tools)
        if not marked:
            return [self._mark(render(messages), [])]
        spans, turns = [], []
        for at, message in enumerate(messages):
            # The beginning of the text was given to the model, not written by it.
            if message["role"] != "assistant" or at == 0:
                continue
            before, turn = render(messages[:at], prompt=True), render(messages[: at + 1])
            if not turn.startswith(before):
                raise ValueError(
                    "The chat template renders an assistant's turn otherwise than the prompt for it, so its tokens "
                    "are not known; mark them in the template with {% generation %} and {% endgeneration %}, or "
                    "train on all tokens (train_on='all')."
                )
            spans.append((len(before), len(turn)))
            turns.append(turn)
        whole = render(messages)
        if all(whole.startswith(turn) for turn in turns):
            return [self._mark(whole, spans)]
        return [self._mark(turn, [span]) for turn, span in zip(turns, spans, strict=True)]

    def _mark(self, text: str, spans: list[tuple[int, int]]) -> Document:
        """Token ids [n] of `text`, and bool [n]: in one of the spans of characters, up to its first end token."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.array(encoded["input_ids"], np.int32)
        starts = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)[:, 0]
        written = np.zeros(len(ids), bool)
        for begin, end in spans:
            first, last = np.searchsorted(starts, (begin, end))
            ends = np.flatnonzero(ids[first:last] == self.tokenizer.eos_token_id)
            written[first : first + ends[0] + 1 if len(ends) else last] = True
        return ids, written

    def _apply(self, messages: list[Message], **options: Any) -> Any:
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return apply_template(self.tokenizer, messages, chat_template=self.template, **thinking, **options)
