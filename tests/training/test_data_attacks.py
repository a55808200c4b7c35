"""Damaged and hostile training data: every file is read as what it is or refused in one sentence."""

from __future__ import annotations

import json
import random
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.attacks import changed, damaged, seeds, survives
from support.chats import CONVERSATION, MARKED, PLAIN, THINKING, chat_tokenizer
from support.tiny_training import write_rows

from hf_dart.training import DataArguments, load_rows
from hf_dart.training.data import sources
from hf_dart.training.data.chat import ChatFormat

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0  # 5 seconds after each stream of Parquet
LENGTH = 64
TOKENIZER = chat_tokenizer()
TEXTS = [f"def f{i}(x):\n    return x + {i}  # Küche\n" * (i % 3 + 1) for i in range(6)]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SHAREGPT = [{"from": "human", "value": "Add."}, {"from": "gpt", "value": "def add(a, b):\n    return a + b"}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": text, "source": "a"} for text in TEXTS],
    "ids": [{"input_ids": TOKENIZER(text)["input_ids"], "prompt_tokens": 3, "text": text} for text in TEXTS],
    "messages": [{"messages": CONVERSATION, "tools": [TOOL]} for _ in range(3)],
    "tools": [{"messages": CONVERSATION, "tools": json.dumps([TOOL])} for _ in range(3)],
    "conversations": [{"conversations": SHAREGPT} for _ in range(3)],
}


def attacked(file: Path, rows: list[dict[str, Any]], good: bytes, seed: int) -> None:
    """Write the file again, damaged, or where it holds JSON with a row, or a message of one, changed."""
    if file.suffix not in (".jsonl", ".json") or seed % 4 == 3:
        file.write_bytes(damaged(good, seed))
        return
    choice, lines = Random(seed), [json.dumps(row) for row in rows]
    place = choice.randrange(len(lines))
    row = rows[place]
    field = next((name for name in ("messages", "conversations") if name in row), None)
    if field is None or choice.random() < 0.4:
        lines[place] = changed(row, choice.randrange(2**30))
    else:
        at = choice.randrange(len(row[field]))
        message = json.loads(changed(row[field][at], 8 * choice.randrange(2**20) + choice.randrange(7)))
        lines[place] = json.dumps({**row, field: [*row[field][:at], message, *row[field][at + 1 :]]})
    content = "\n".join(lines) if file.suffix == ".jsonl" else f"[{', '.join(lines)}]"
    file.write_text(content, encoding="latin1")


def read(folder: Path, name: str, streaming: bool) -> list[list[int]]:
    """The first rows, each checked."""
    fields: dict[str, Any] = {"cache_dir": str(folder / "cache"), "streaming": streaming, "max_length": LENGTH}
    state = random.getstate(), np.random.get_state()[1].tolist()
    try:
        rows = list(islice(load_rows(DataArguments([name], **fields), TOKENIZER, 4)[0], 8))
    finally:
        assert state == (random.getstate(), np.random.get_state()[1].tolist())
    for row in rows:
        assert row["input_ids"].shape == row["documents"].shape == row["loss_mask"].shape == (LENGTH,)
        assert 0 <= row["input_ids"].min() <= row["input_ids"].max() < len(TOKENIZER)
        assert row["loss_mask"].any()
        assert not row["loss_mask"][row["documents"] < 0].any()
    return [row["input_ids"].tolist() for row in rows]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's first row waits for a whole batch: of a small file, the same documents again and again."""
    monkeypatch.setattr(sources, "_BATCH", 5)


@pytest.mark.parametrize("part", seeds(2, 500))
@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        *((kind, ".jsonl") for kind in ROWS),
        *(("text", ending) for ending in (".json", ".parquet", ".txt")),
        ("messages", ".parquet"),
        ("ids", ".bin"),
        *(pytest.param(*one, marks=pytest.mark.matrix) for one in (("messages", ".json"), ("ids", ".parquet"))),
    ],
)
def test_files(tmp_path: Path, kind: str, ending: str, part: range) -> None:
    """Each is read or refused; the fixed file of the same name is read as if nothing had been."""
    file = tmp_path / f"data{ending}"
    good = write_rows(file, ROWS[kind], TOKENIZER.eos_token_id)
    reading = partial(read, tmp_path, str(file))
    expected = [reading(streaming=streaming) for streaming in (False, True)]
    outcomes = []
    for seed in part:
        attacked(file, ROWS[kind], good, seed)
        outcomes.append(survives(partial(reading, streaming=seed // 2 % 2 == 1)))
    file.write_bytes(good)
    assert [reading(streaming=streaming) for streaming in (False, True)] == expected
    assert len(part) < 50 or 0 < sum(outcomes) < len(part)


@pytest.mark.parametrize("part", seeds(40, 1200))
def test_chat_templates(part: range) -> None:
    read = 0
    for seed in part:
        template = damaged((PLAIN, MARKED, THINKING)[seed % 3].encode(), seed).decode("latin1")

        def encode(template: str = template) -> None:
            for ids, mask in ChatFormat(TOKENIZER, template).encode(CONVERSATION):
                assert ids.shape == mask.shape
                assert not len(ids) or 0 <= ids.min() <= ids.max() < len(TOKENIZER)

        read += survives(encode)
    assert 0 < read < len(part)
