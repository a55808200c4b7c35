"""Replies that special tokens divide into parts."""

from __future__ import annotations

from typing import Any

import pytest
from support.chats import CONVERSATION, PLAIN
from test_fit import one_sentence
from test_regenerate import small_writer

from hf_dart.training.data.chat import ChatFormat
from hf_dart.training.regenerate.sampling import Sampling

TEMPLATE = {
    "start_anchor": "<assistant>\n",
    "defaults": {"role": "assistant"},
    "fields": {"thinking": {"open": "<|thought|>", "close": "<|said|>"}, "content": {"close": "<|endoftext|>"}},
}


def test_parts_of_a_reply_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = small_writer()
    tokenizer = writer.tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|thought|>", "<|said|>"]})
    writer.chat = ChatFormat(tokenizer, PLAIN, None)
    text = "<|thought|>add them<|said|>def add(a, b):\n    return a + b"
    written = [*tokenizer(text, add_special_tokens=False)["input_ids"], min(writer.ends)]

    def reply() -> Any:
        return writer.reply([(CONVERSATION[:2], None)], 12, Sampling(), 0)[0]

    monkeypatch.setattr(writer, "continue_texts", lambda *_: [written])
    with pytest.raises(ValueError, match=r"special token .<\|thought\|>") as error:
        reply()
    assert "response_template" in one_sentence(error)
    tokenizer.response_template = {
        **TEMPLATE,
        "fields": {**TEMPLATE["fields"], "content": {"close": tokenizer.decode(written[-1:])}},  # type: ignore[dict-item]
    }
    message, finished = reply()
    assert message == {"role": "assistant", "thinking": "add them", "content": "def add(a, b):\n    return a + b"}
    assert finished
