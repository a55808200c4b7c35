"""Conversations: which tokens are the assistant's, and that only they are trained on."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.chats import CONVERSATION, MARKED, OTHER_PROMPT, PLAIN, THINKING, chat_tokenizer
from support.sentences import refused
from support.tiny_training import VOCABULARY, tiny_head, tiny_target, trainer_on, write_json_lines
from torch import Tensor

from hf_dart import DartConfig, DartHead
from hf_dart.errors import UserError
from hf_dart.models.tokenizers import template_hash
from hf_dart.training import DataArguments, load_rows
from hf_dart.training.data.chat import ChatFormat, as_messages

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()
REPLIES = [message["content"] for message in CONVERSATION if message["role"] == "assistant"]


def runs_of(ids: np.ndarray, mask: np.ndarray, tokenizer: Any) -> list[str]:
    """The text of each run of marked tokens."""
    edges = [0, *(np.flatnonzero(np.diff(mask.astype(int))) + 1).tolist(), len(ids)]
    return [tokenizer.decode(ids[begin:end]) for begin, end in pairwise(edges) if mask[begin]]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_assistants_tokens_are_its_replies_and_their_ends(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    chat = ChatFormat(tokenizer)
    ((ids, mask),) = chat.encode(CONVERSATION)
    assert ids.tolist() == tokenizer(chat.render(CONVERSATION), add_special_tokens=False)["input_ids"]
    assert runs_of(ids, mask, tokenizer) == [reply + tokenizer.eos_token for reply in REPLIES]
    ((same, nothing),) = chat.encode(CONVERSATION, marked=False)
    assert (same == ids).all()
    assert not nothing.any()


@pytest.mark.parametrize("enable_thinking", [None, True, False])
def test_a_template_that_drops_thoughts_gives_a_document_for_each_turn(enable_thinking: bool | None) -> None:
    tokenizer = chat_tokenizer(THINKING)
    thought = "" if enable_thinking is False else "<think>\nHm.\n</think>\n\n"
    messages = [{**m, "content": thought + m["content"]} if m["role"] == "assistant" else m for m in CONVERSATION]
    documents = ChatFormat(tokenizer, enable_thinking=enable_thinking).encode(messages)
    assert [runs_of(*document, tokenizer) for document in documents] == [
        [thought + reply + tokenizer.eos_token] for reply in REPLIES
    ]
    # The second is rendered as the model meets it: without the thought of the first turn.
    assert tokenizer.decode(documents[1][0]).count("<think>") == 1


def test_messages_of_other_kinds_are_understood_or_refused() -> None:
    with pytest.raises(ValueError, match=r"mark them in the template with \{% generation %\}"):
        ChatFormat(chat_tokenizer(OTHER_PROMPT)).encode(CONVERSATION)
    refused(lambda: ChatFormat(chat_tokenizer(None)), ValueError, "has no chat template; set its chat_template")
    picky = "{% if messages[0].role != 'user' %}{{ raise_exception('Users speak first') }}{% endif %}" + PLAIN
    with pytest.raises(ValueError, match=r"messages of system, user \(Users speak first\); mend it"):
        ChatFormat(chat_tokenizer(), picky).encode(CONVERSATION)
    refused(lambda: as_messages([{"speaker": "a", "content": "b"}]), ValueError, r"has the fields .*'speaker'")
    turns = [{"from": "human", "value": "Hi.", "role": None}, {"from": "gpt", "value": "Hello."}]
    assert as_messages(turns) == [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    tokenizer = chat_tokenizer()
    messages = [{"role": "assistant", "content": "Welcome."}, *CONVERSATION[1:3]]
    (document,) = ChatFormat(tokenizer).encode(messages)
    assert runs_of(*document, tokenizer) == [REPLIES[0] + tokenizer.eos_token]


def test_rows_of_conversations(tmp_path: Path) -> None:
    last = [{"role": "assistant", "content": f"x = {n}\n" * 9} for n in range(12)]
    source = write_json_lines(tmp_path / "chats.jsonl", [{"messages": [*CONVERSATION[:-1], one]} for one in last])
    tokenizer, config = chat_tokenizer(THINKING), DartConfig()
    shared: dict[str, Any] = {"max_length": 160, "cache_dir": str(tmp_path / "cache")}
    arguments = DataArguments([source], enable_thinking=False, **shared)
    rows, _ = load_rows(arguments, tokenizer, 4, config)
    written = [tokenizer.decode(row["input_ids"][row["loss_mask"]]) for row in rows]
    assert sum(text.count("def multiply") for text in written) == 0
    assert sum(text.count(REPLIES[0]) for text in written) == 12
    assert not any("Add two" in text or "<user>" in text for text in written)
    assert (config.chat_template_hash, config.enable_thinking) == (template_hash(THINKING), False)

    file = tmp_path / "plain.jinja"
    file.write_text(PLAIN)
    load_rows(DataArguments([source], chat_template=str(file), **shared), tokenizer, 4, config)
    assert (config.chat_template_hash, config.enable_thinking) == (template_hash(PLAIN), None)
    rows, _ = load_rows(DataArguments([source], train_on="all", **shared), tokenizer, 4)
    everything = next(iter(rows))
    assert (everything["loss_mask"] == (everything["documents"] >= 0)).all()
    with pytest.raises(UserError, match=r"Cannot read the chat template 'missing\.jinja'"):
        load_rows(DataArguments([source], chat_template="missing.jinja", **shared), tokenizer, 4)

    unanswered = write_json_lines(tmp_path / "unanswered.jsonl", [{"messages": CONVERSATION[:2]}])
    with pytest.raises(ValueError, match=r"or have no reply of an assistant so long.*check the roles"):
        load_rows(DataArguments([unanswered], **shared), tokenizer, 4)


def test_another_chat_template_than_the_heads_is_told(tmp_path: Path) -> None:
    target, tokenizer = tiny_target(), chat_tokenizer()
    head = tiny_head(target, chat_template_hash=template_hash(PLAIN), enable_thinking=False)
    head.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = DartHead.from_pretrained(str(tmp_path), target=target, tokenizer=tokenizer)
    assert loaded.config.enable_thinking is False
    tokenizer.chat_template = MARKED
    with pytest.warns(UserWarning, match="another chat template"):
        DartHead.from_pretrained(str(tmp_path), target=target, tokenizer=tokenizer)


def test_tokens_that_are_not_the_assistants_move_no_weight(tmp_path: Path) -> None:
    """What stands after the last marked token, in the reach of no label, is for the loss as if it were not there."""
    ids = torch.randint(2, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(3))
    mask = torch.zeros(24, dtype=torch.bool)
    mask[6:10] = True

    def loss_of(ids: Tensor) -> float:
        rows = [{"input_ids": row, "documents": torch.zeros_like(row), "loss_mask": mask} for row in ids]
        trainer = trainer_on(tmp_path, rows, loss="left_to_right", anchors_per_row=24)
        batch = trainer.data_collator(rows)
        assert trainer.draw(batch, torch.Generator()) == 2 * 4
        with torch.no_grad():
            return trainer.compute_loss(trainer.drafter, batch).item()

    behind, before = ids.clone(), ids.clone()
    behind[:, 10:] = (behind[:, 10:] + 1) % VOCABULARY
    before[:, :6] = (before[:, :6] + 1) % VOCABULARY
    assert loss_of(ids) == loss_of(behind) != loss_of(before)
