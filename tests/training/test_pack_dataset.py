"""Trainers take datasets of text, conversations, and prompts with completions, as TRL's users expect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.chats import chat_tokenizer
from support.tiny_training import write_json_lines
from transformers import AutoModelForCausalLM

from hf_dart import DartHead
from hf_dart.hub.loading import PACKAGED_TARGET
from hf_dart.training import DartTrainer, DataArguments, load_rows
from hf_dart.training.data.sources import pack_dataset

datasets = pytest.importorskip("datasets")

TEXT = [f"def function_{i}(argument):\n    return argument + {i}\n" * 3 for i in range(8)]
TURNS = [[{"role": "user", "content": f"add {i}"}, {"role": "assistant", "content": TEXT[i]}] for i in range(8)]
ROWS: dict[str, dict[str, list[Any]]] = {
    "text": {"text": TEXT},
    "messages": {"messages": TURNS},
    "completions": {"prompt": ["# add\n"] * 8, "completion": TEXT},
    "conversations": {"prompt": [turns[:1] for turns in TURNS], "completion": [turns[1:] for turns in TURNS]},
}


@pytest.fixture(scope="module")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(PACKAGED_TARGET, dtype=torch.float32)


@pytest.mark.parametrize("kind", ROWS)
def test_they_are_packed_inside(target: Any, kind: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    head = DartHead.from_target(target, draft_length=3, tokenizer=tokenizer)
    documents = datasets.Dataset.from_dict(ROWS[kind])
    options: dict[str, Any] = {"max_steps": 2, "logging_steps": 1, "anchors_per_row": 4, "save_strategy": "no"}
    options |= {"report_to": "none", "eval_strategy": "steps", "eval_steps": 2, "disable_tqdm": True}
    settings = DartTrainer.training_arguments(str(tmp_path / "run"), **options)
    given = {"train_dataset": documents, "eval_dataset": documents, "processing_class": tokenizer, "max_length": 64}
    trainer = DartTrainer(head, target, settings, **given)
    trainer.train()
    logs = trainer.state.log_history
    assert {"loss", "agreement_1", "agreement_3"} <= logs[0].keys()
    assert "eval_tau" in logs[-2] or "eval_tau" in logs[-1]
    assert (head.config.chat_template_hash is not None) == (kind in ("messages", "conversations"))

    file = write_json_lines(tmp_path / "rows.jsonl", documents)
    arguments = DataArguments(train_data=[file], max_length=64, cache_dir=str(tmp_path / "cache"))
    wanted = load_rows(arguments, tokenizer, 3)[0]
    assert len(trainer.train_dataset) == len(wanted)
    for ours, theirs in zip(trainer.train_dataset, wanted, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ("input_ids", "documents", "loss_mask"))


@pytest.mark.parametrize("kind", ["completions", "conversations"])
def test_what_is_learned_is_the_completion(kind: str) -> None:
    tokenizer = chat_tokenizer()
    rows = pack_dataset(datasets.Dataset.from_dict(ROWS[kind]), tokenizer, 3, 256)
    learned = [ids[mask] for ids, mask in zip(rows["input_ids"], rows["loss_mask"], strict=True)]
    text = tokenizer.decode(np.concatenate(learned))
    assert text.replace(tokenizer.eos_token, "").count("def function_") == 24
    assert "add" not in text


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="processing_class=tokenizer"):
        pack_dataset(datasets.Dataset.from_dict(ROWS["text"]), None, 3, 64)
    rows = datasets.Dataset.from_dict({"messages": TURNS, "images": [[i] for i in range(8)]})
    with pytest.raises(ValueError, match=r"the field 'images', .* with hf_dart\.training\.image_row\.$"):
        pack_dataset(rows, chat_tokenizer(), 3, 64)


def test_streams_are_packed_too(target: Any) -> None:
    stream = datasets.Dataset.from_dict(ROWS["text"]).to_iterable_dataset()
    assert next(iter(pack_dataset(stream, chat_tokenizer(), 3, 64)))["input_ids"].shape == (64,)
