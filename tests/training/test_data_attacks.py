"""Damaged and hostile training data: every file is read as what it is or refused in one sentence."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from support.attacks import changed, damaged, seeds, survives
from support.chats import CONVERSATION, MARKED, PLAIN, THINKING, chat_tokenizer

from hf_dart import NgramTable
from hf_dart.bench.memory import peak_bytes, reset_peak
from hf_dart.cli import main
from hf_dart.training import DataArguments, load_rows
from hf_dart.training.data import sources
from hf_dart.training.data.chat import ChatFormat
from hf_dart.training.data.sources import read_template

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()
DRAFT, LENGTH = 4, 64
TOKENIZER = chat_tokenizer()
TEXTS = [f"def f{i}(x):\n    return x + {i}\n" * (i % 3 + 1) for i in range(6)]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SHAREGPT = [{"from": "human", "value": "Add."}, {"from": "gpt", "value": "def add(a, b):\n    return a + b"}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": text, "source": "a"} for text in TEXTS],
    "ids": [{"input_ids": TOKENIZER(text)["input_ids"], "prompt_tokens": 3, "text": text} for text in TEXTS],
    "messages": [{"messages": CONVERSATION, "tools": [TOOL]} for _ in range(3)],
    "tools": [{"messages": CONVERSATION, "tools": json.dumps([TOOL])} for _ in range(3)],
    "conversations": [{"conversations": SHAREGPT} for _ in range(3)],
}


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows), encoding="utf8")
    elif file.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    elif file.suffix == ".bin":
        eos = TOKENIZER.eos_token_id
        np.concatenate([[*row["input_ids"], eos] for row in rows]).astype(np.uint16).tofile(file)
    elif file.suffix in (".txt", ".py"):
        file.write_text("\n\n".join(row["text"] for row in rows) + "Küche", encoding="utf8")
    else:
        datasets.Dataset.from_list(rows).save_to_disk(file)


def other_row(row: dict[str, Any], seed: int) -> str:
    """`changed`, of a row or of one of its messages."""
    choice = Random(seed)
    field = next((name for name in ("messages", "conversations") if name in row), None)
    if field is None or choice.random() < 0.4:
        return changed(row, choice.randrange(2**30))
    place = choice.randrange(len(row[field]))
    message = json.loads(changed(row[field][place], 8 * choice.randrange(2**20) + choice.randrange(7)))
    return json.dumps({**row, field: [*row[field][:place], message, *row[field][place + 1 :]]})


def attacked(file: Path, rows: list[dict[str, Any]], good: bytes, seed: int) -> None:
    """Write the file again, damaged, or where it holds JSON with one row changed."""
    if file.suffix not in (".jsonl", ".json") or seed % 4 == 3:
        file.write_bytes(damaged(good, seed))
        return
    lines = [json.dumps(row) for row in rows]
    place = Random(seed).randrange(len(lines))
    lines[place] = other_row(rows[place], seed)
    content = "\n".join(lines) if file.suffix == ".jsonl" else f"[{', '.join(lines)}]"
    file.write_text(content, encoding="latin1")


def read(folder: Path, name: str, streaming: bool, **fields: Any) -> list[list[int]]:
    """The first rows, each checked."""
    fields |= {"cache_dir": str(folder / "cache"), "streaming": streaming}
    arguments = DataArguments(train_data=[name], max_length=LENGTH, **fields)
    state = random.getstate(), np.random.get_state()[1].tolist()
    try:
        rows = list(islice(load_rows(arguments, TOKENIZER, DRAFT)[0], 8))
    finally:
        assert state == (random.getstate(), np.random.get_state()[1].tolist())
    for row in rows:
        assert row["input_ids"].shape == row["documents"].shape == row["loss_mask"].shape == (LENGTH,)
        assert 0 <= row["input_ids"].min() <= row["input_ids"].max() < len(TOKENIZER)
        assert row["loss_mask"].dtype == torch.bool
        assert row["loss_mask"].any()
        assert not row["loss_mask"][row["documents"] < 0].any()
    return [row["input_ids"].tolist() for row in rows]


def unharmed(attack: Callable[[int], None], mend: Callable[[], Any], reading: Callable[..., Any], part: range) -> None:
    """Attacks, each read or refused; now and then the fixed file of the same name is read as if nothing had been."""
    expected = [reading(streaming=streaming) for streaming in (False, True)]
    reset_peak(torch.device("cpu"))
    before = peak_bytes(torch.device("cpu"))
    outcomes = []
    for seed in part:
        attack(seed)
        outcomes.append(survives(partial(reading, streaming=seed // 2 % 2 == 1)))
        if seed % 25 == 24 or seed == part[-1]:
            mend()
            assert [reading(streaming=streaming) for streaming in (False, True)] == expected
    assert len(part) < 50 or 0 < sum(outcomes) < len(part)
    assert peak_bytes(torch.device("cpu")) - before < 500 * 2**20


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's first row waits for a whole batch: of a small file, the same documents again and again."""
    monkeypatch.setattr(sources, "_BATCH", 5)


@pytest.mark.parametrize("part", seeds(2, 500))
@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        *((kind, ".jsonl") for kind in ROWS),
        *(("text", ending) for ending in (".json", ".parquet", ".txt", ".py")),
        *(("messages", ending) for ending in (".json", ".parquet")),
        ("ids", ".parquet"),
    ],
)
def test_files(tmp_path: Path, kind: str, ending: str, part: range) -> None:
    attack_file(tmp_path, f"data{ending}", kind, part)


@pytest.mark.parametrize("part", seeds(4, 1000))
def test_token_files(tmp_path: Path, part: range) -> None:
    attack_file(tmp_path, "data.bin", "ids", part)


def attack_file(folder: Path, name: str, kind: str, part: range, **fields: Any) -> None:
    file = folder / name
    write_rows(file, ROWS[kind])
    good = file.read_bytes()
    unharmed(
        partial(attacked, file, ROWS[kind], good),
        lambda: file.write_bytes(good),
        partial(read, folder, str(file), **fields),
        part,
    )


@pytest.mark.parametrize("part", seeds(3, 1000))
def test_folders_of_save_to_disk(tmp_path: Path, part: range) -> None:
    """Such a folder keeps its fingerprint whatever becomes of its files, and rows are cached in it."""
    write_rows(tmp_path / "good", ROWS["text"])
    names = sorted(path.name for path in (tmp_path / "good").iterdir())
    assert len(names) == 3

    def mend() -> None:
        for name in names:
            shutil.copy(tmp_path / "good" / name, tmp_path / "data" / name)

    def attack(seed: int) -> None:
        mend()
        name = names[seed % 3]
        content = (tmp_path / "good" / name).read_bytes()
        if name.endswith(".json") and seed % 2:
            (tmp_path / "data" / name).write_text(changed(json.loads(content), seed), encoding="latin1")
        else:
            (tmp_path / "data" / name).write_bytes(damaged(content, seed))

    (tmp_path / "data").mkdir()
    mend()
    unharmed(attack, mend, partial(read, tmp_path, str(tmp_path / "data")), part)


@pytest.mark.parametrize("part", seeds(40, 1200))
def test_chat_templates(tmp_path: Path, part: range) -> None:
    file = tmp_path / "template.jinja"
    read = 0
    for seed in part:
        file.write_bytes(damaged((PLAIN, MARKED, THINKING)[seed % 3].encode(), seed))

        def encode() -> None:
            for ids, mask in ChatFormat(TOKENIZER, read_template(str(file))).encode(CONVERSATION):
                assert ids.shape == mask.shape
                assert not len(ids) or 0 <= ids.min() <= ids.max() < len(TOKENIZER)

        read += survives(encode)
    assert 0 < read < len(part)


@pytest.mark.parametrize("part", seeds(3, 1000))
@pytest.mark.parametrize("kind", ["text", "npy", "raw", "dataset"])
def test_corpora_of_ngrams(
    tmp_path: Path, kind: str, part: range, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    names = {"text": "a.txt", "npy": "a.npy", "raw": "a.bin", "dataset": "a.jsonl"}
    file, table = tmp_path / names[kind], tmp_path / "a.ngram"
    if kind == "npy":
        np.save(file, np.concatenate([row["input_ids"] for row in ROWS["ids"]]).astype(np.uint16))
    else:
        write_rows(file, ROWS["text" if kind in ("text", "dataset") else "ids"])
    words = {"text": ["--text", str(file)], "npy": ["--tokens", str(file)], "raw": ["--tokens", str(file)]}
    words["dataset"] = ["--dataset", str(file)]
    good = file.read_bytes()
    for seed in part:
        attacked(file, ROWS["text"], good, seed)
        state = torch.get_rng_state()
        done = main(["ngram", "build", str(table), *words[kind]])
        said = capsys.readouterr().err
        assert torch.equal(torch.get_rng_state(), state)
        assert done in (0, 2), said
        assert table.exists() == (done == 0)
        if done == 0:
            NgramTable.load(table)
            table.unlink()
        else:
            assert said.strip().splitlines()[-1].startswith("hf-dart: "), said
            assert "Traceback" not in said
        assert {path.name for path in tmp_path.iterdir()} <= {file.name, "cache"}
