"""Where training rows come from: files, streams, mixtures, and what is wrong with them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.chats import chat_tokenizer
from support.sentences import refused
from support.tiny_training import tiny_head, tiny_target, write_json_lines, write_rows
from transformers import AutoTokenizer, default_data_collator

from hf_dart import DartConfig
from hf_dart.hub.loading import PACKAGED_TARGET
from hf_dart.models.tokenizers import vocabulary_hash
from hf_dart.training import DartTrainer, DataArguments, PackedTokens, load_rows
from hf_dart.training.data.packing import Packer
from hf_dart.training.data.sources import pack_dataset
from hf_dart.training.objective.blocks import draw_anchors

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0  # 5 seconds after each stream of Parquet
DRAFT = 4
TEXTS = [f"def f{i}(x):\n    return x + {i}\n" * (i % 7 + 1) for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(PACKAGED_TARGET)


def arguments_for(folder: Path, *sources: str, **fields: Any) -> DataArguments:
    fields = {"max_length": 64, "cache_dir": str(folder / "cache"), **fields}
    return DataArguments(train_data=list(sources), **fields)


def documents_of(rows: Any) -> list[list[int]]:
    """The pieces in the rows, in the order of their ids."""
    found = []
    for row in rows:
        assert row["input_ids"].shape == row["documents"].shape == row["loss_mask"].shape == (64,)
        assert not row["loss_mask"][row["documents"] < 0].any()
        for number in range(int(row["documents"].max()) + 1):
            found.append(row["input_ids"][row["documents"] == number].tolist())
    return sorted(found)


def pieces_of(texts: list[str], tokenizer: Any) -> list[list[int]]:
    documents = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    pieces = [ids[at : at + 64] for ids in documents for at in range(0, len(ids), 64)]
    return sorted(piece for piece in pieces if len(piece) > DRAFT)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "json", "txt", "py", "bin", "saved", "pattern", "parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, tokenizer: Any, kind: str, streaming: bool) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    name = str(folder)
    if kind in ("jsonl", "json", "parquet"):
        write_rows(folder / f"a.{kind}", [{"text": text} for text in TEXTS], 0)
    elif kind == "bin":
        rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in TEXTS]
        write_rows(folder / "a.bin", rows, tokenizer.eos_token_id)
    elif kind == "saved":
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(folder)
    elif kind == "pattern":
        for part in range(3):
            write_json_lines(folder / f"{part}.jsonl", [{"text": text} for text in TEXTS[part::3]])
        (folder / "about.json").write_text("{}")
        name = str(folder / "*.jsonl")
    else:
        for at, text in enumerate(TEXTS):
            (folder / f"{at:02}.{kind}").write_text(text)
    rows, evaluation = load_rows(arguments_for(tmp_path, name, streaming=streaming), tokenizer, DRAFT)
    assert evaluation is None
    rows = list(islice(rows, 500))
    found, wanted = documents_of(rows), pieces_of(TEXTS, tokenizer)
    if streaming:  # over and over
        assert len(rows) == 500
        assert {*map(tuple, found)} == {*map(tuple, wanted)}
    else:
        assert found == wanted
    padding = sum(int((row["documents"] < 0).sum()) for row in rows)
    assert padding < 64 + 0.05 * 64 * len(rows)
    batch = default_data_collator(rows)
    anchors = draw_anchors(batch["documents"], 8, DRAFT, loss_mask=batch["loss_mask"])
    assert (anchors >= 0).all(dim=1).float().mean() > 0.9


def test_rows_are_cached_until_something_changes(tmp_path: Path) -> None:
    """Without packing, every row is one document."""
    source = write_json_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    files = []
    for fields in ({}, {}, {"packing": False}):
        tokenizer = AutoTokenizer.from_pretrained(PACKAGED_TARGET)
        rows, _ = load_rows(arguments_for(tmp_path, source, **fields), tokenizer, DRAFT)
        files.append(rows.cache_files[0]["filename"])
    assert files[0] == files[1] != files[2]
    assert documents_of(rows) == pieces_of(TEXTS, tokenizer)
    assert all(int(row["documents"].max()) == 0 for row in rows)


def test_a_stream_has_one_order_and_no_end(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [
        write_json_lines(tmp_path / f"{part}.jsonl", [{"text": text} for text in TEXTS[part::2]]) for part in range(2)
    ]
    monkeypatch.setattr("hf_dart.training.data.sources._SHUFFLED", 8)

    def stream(seed: int = 0) -> Any:
        arguments = arguments_for(tmp_path, str(tmp_path / "*.jsonl"), shuffle_seed=seed, streaming=True)
        return load_rows(arguments, tokenizer, DRAFT)[0]

    def first(rows: Any) -> list[list[int]]:
        return [row["input_ids"].tolist() for row in islice(rows, 300)]

    rows = first(stream())
    assert first(stream()) == rows
    assert first(stream(seed=1)) != rows
    assert first(stream().skip(290))[:10] == rows[290:]
    with pytest.raises(ValueError, match="Streams of several sources are mixed; give shares"):
        arguments_for(tmp_path, *sources, streaming=True)


def test_mixtures_and_held_out_documents(tmp_path: Path, tokenizer: Any) -> None:
    sources = [write_json_lines(tmp_path / f"{one}.jsonl", [{"text": one * 300}] * 40) for one in "ab"]
    letters = [tokenizer(letter * 300)["input_ids"][1] for letter in "ab"]
    pieces = len(pieces_of(["a" * 300], tokenizer))
    for streaming in (False, True):
        fields = {"shares": [0.25, 0.75], "eval_documents": 3, "streaming": streaming}
        rows, held_out = load_rows(arguments_for(tmp_path, *sources, **fields), tokenizer, DRAFT)
        drawn = [letters.index(int(row["input_ids"][1])) for row in islice(rows, 200)]
        assert 0.6 < sum(drawn) / len(drawn) < 0.9
        assert held_out is not None
        kept = Counter(letters.index(int(row["input_ids"][1])) for row in held_out)
        assert kept[0] == kept[1] > 0
        assert sum(int(row["documents"].max()) + 1 for row in held_out) == 2 * 3 * pieces


def test_token_ids_know_which_the_target_wrote(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"input_ids": list(range(10, 40)), "prompt_tokens": 12, "text": "not read"}]
    source = write_json_lines(tmp_path / "a.jsonl", rows)
    for train_on, written in (("assistant", 18), ("all", 30)):
        (row,) = load_rows(arguments_for(tmp_path, source, train_on=train_on), tokenizer, DRAFT)[0]
        assert row["input_ids"][:30].tolist() == list(range(10, 40))
        assert row["loss_mask"].sum() == row["loss_mask"][30 - written : 30].sum() == written


@pytest.mark.parametrize("streaming", [False, True])
def test_what_cannot_be_trained_on_is_said_in_one_sentence(tmp_path: Path, tokenizer: Any, streaming: bool) -> None:
    def cannot(source: str, match: str, **fields: Any) -> None:
        arguments = arguments_for(tmp_path, source, streaming=streaming, **fields)
        refused(lambda: load_rows(arguments, tokenizer, DRAFT), ValueError, match)

    def lines(*rows: dict[str, Any]) -> str:
        return write_json_lines(tmp_path / f"{next(numbers)}.jsonl", rows)

    numbers = count()
    cannot(str(tmp_path / "missing.jsonl"), "no file or folder .*missing.jsonl; fix the path")
    cannot(str(tmp_path / "*.none"), "files of one ending, of .*, and names none; fix it")
    cannot("someone/nothing", "The dataset 'someone/nothing' cannot be read")
    cannot(lines({"body": "x"}), "has no field .*'text', only 'body'; rename one .*, or name the one .* text_field")
    cannot(lines({"text": "x" * 99}), "has no field 'body', only 'text'", text_field="body")
    cannot(lines({"text": ["x"]}), "holds list in 'text', not text")
    cannot(lines({"messages": "hello"}), "no messages|no chat template")
    cannot(lines({"text": ""}), "holds nothing to train on: its documents are empty, shorter than the 5 tokens")
    cannot(lines({"input_ids": [5, 99999, 7, 8, 9, 10, 11]}), "99999, .* as 'input_ids' .* this tokenizer's 6144")
    cannot(lines({"input_ids": list(range(20)), "prompt_tokens": 20}), "or have no reply of an assistant so long")
    cannot(lines({"text": TEXTS[3]}), "or have no reply .* so long", max_length=3)

    for name, content, match in (
        ("empty.jsonl", b"", "empty.jsonl is empty; give a source"),
        ("broken.jsonl", b'{"text": "a"}\nno json\n', "does not hold JSON lines, as its ending says"),
        ("broken.parquet", b"no parquet", "does not hold Parquet"),
        ("latin.txt", "Küche".encode("latin1"), "does not hold UTF-8 text"),
        ("odd.bin", b"\x01\x00\x02", "an odd number of bytes"),
        ("other.bin", np.arange(7000, dtype=np.uint16).tobytes(), "give ids of this tokenizer's 6144"),
        ("table.csv", b"a,b\n", "names '.csv'"),
    ):
        (tmp_path / name).write_bytes(content)
        cannot(str(tmp_path / name), match)
    (tmp_path / "nothing").mkdir()
    cannot(str(tmp_path / "nothing"), "names none")


def test_another_tokenizer_than_the_heads_and_arguments_out_of_range(tmp_path: Path, tokenizer: Any) -> None:
    source = write_json_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    config = DartConfig(tokenizer_hash=vocabulary_hash(tokenizer))
    load_rows(arguments_for(tmp_path, source), tokenizer, DRAFT, config)
    assert config.chat_template_hash is None
    config.tokenizer_hash = "0" * 16
    with pytest.raises(ValueError, match="The tokenizer is not the one that the head was made with"):
        load_rows(arguments_for(tmp_path, source), tokenizer, DRAFT, config)
    for wrong in ({"train_data": []}, {"train_on": "user"}, {"max_length": 1}, {"shares": [0.5, 0.5]}, {"shares": [0]}):
        refused(partial(DataArguments, **{"train_data": ["a.jsonl"], **wrong}), ValueError, next(iter(wrong)))


def test_packed_tokens_are_the_rows_of_the_packer() -> None:
    lengths = [5, 30, 9, 3, 12, 2, 20]
    documents = [np.array([*range(100 * i + 1, 100 * i + n), 0], np.int32) for i, n in enumerate(lengths)]
    for share_rows in (True, False):
        rows = PackedTokens(np.concatenate(documents).astype(np.uint16), 16, 0, minimum=3, share_rows=share_rows)
        packed = Packer(16, 2, share_rows)((ids, np.ones(len(ids), bool)) for ids in documents)
        assert [row["input_ids"].tolist() for row in rows] == [ids.tolist() for ids in packed["input_ids"]]
        assert [row["documents"].tolist() for row in rows] == [of.tolist() for of in packed["documents"]]
    # Every piece of a document begins as the document does.
    ids, mask = np.arange(20, dtype=np.int32), np.ones(20, bool)
    mask[9] = False
    rows = Packer(8, 2, share_rows=False, bos=0)([(ids, mask)])
    found = [row[documents >= 0].tolist() for row, documents in zip(rows["input_ids"], rows["documents"], strict=True)]
    assert found == [[*range(8)], [0, *range(8, 15)], [0, *range(15, 20)]]
    learned = [np.flatnonzero(row).tolist() for row in rows["loss_mask"]]
    assert learned == [[*range(8)], [1, *range(3, 8)], [*range(1, 6)]]
    for bos in (None, 7):  # nothing is put in front of what does not begin with it
        rows = Packer(8, 2, share_rows=False, bos=bos)([(ids, mask)])
        assert rows["input_ids"][1].tolist() == [*range(8, 16)]


FUNCTIONS = [f"def function_{i}(argument):\n    return argument + {i}\n" * 3 for i in range(8)]
TURNS = [[{"role": "user", "content": f"add {i}"}, {"role": "assistant", "content": FUNCTIONS[i]}] for i in range(8)]
ROWS: dict[str, dict[str, list[Any]]] = {
    "text": {"text": FUNCTIONS},
    "messages": {"messages": TURNS},
    "completions": {"prompt": ["# add\n"] * 8, "completion": FUNCTIONS},
    "conversations": {"prompt": [turns[:1] for turns in TURNS], "completion": [turns[1:] for turns in TURNS]},
}


@pytest.mark.parametrize("kind", ROWS)
def test_they_are_packed_inside(kind: str, tmp_path: Path) -> None:
    tokenizer, documents = chat_tokenizer(), datasets.Dataset.from_dict(ROWS[kind])
    target = tiny_target(vocab_size=len(tokenizer))
    head = tiny_head(target, draft_length=3, tokenizer=tokenizer)
    options: dict[str, Any] = {"max_steps": 2, "logging_steps": 1, "anchors_per_row": 4, "save_strategy": "no"}
    options |= {"report_to": "none", "eval_strategy": "steps", "eval_steps": 2, "disable_tqdm": True}
    options |= {"decode_prompts": 2} if kind == "text" else {}
    settings = DartTrainer.training_arguments(str(tmp_path / "run"), **options)
    held_out = {"one": documents, "other": documents.take(4)} if kind == "text" else documents
    given = {"train_dataset": documents, "eval_dataset": held_out, "processing_class": tokenizer, "max_length": 64}
    trainer = DartTrainer(head, target, settings, **given)
    trainer.train()
    logs = trainer.state.log_history
    assert {"loss", "agreement_1", "agreement_3"} <= logs[0].keys()
    taus = {"eval_tau_decoded", *(f"eval_{name}_tau" for name in held_out)} if kind == "text" else {"eval_tau"}
    assert taus <= {name for log in logs for name in log}
    assert trainer.evaluate(documents)["eval_tau"] >= 1
    assert trainer.predict(documents).metrics["test_tau"] >= 1
    assert (head.config.chat_template_hash is not None) == (kind in ("messages", "conversations"))

    file = write_json_lines(tmp_path / "rows.jsonl", documents)
    arguments = DataArguments(train_data=[file], max_length=64, cache_dir=str(tmp_path / "cache"))
    wanted = load_rows(arguments, tokenizer, 3)[0]
    assert len(trainer.train_dataset) == len(wanted)
    for ours, theirs in zip(trainer.train_dataset, wanted, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ("input_ids", "documents", "loss_mask"))
    learned = tokenizer.decode(torch.cat([row["input_ids"][row["loss_mask"]] for row in wanted]))
    assert learned.replace(tokenizer.eos_token, "").count("def function_") == 24
    assert "add" not in learned


def test_streams_are_packed_too_and_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="processing_class=tokenizer"):
        pack_dataset(datasets.Dataset.from_dict(ROWS["text"]), None, 3, 64)
    rows = datasets.Dataset.from_dict({"messages": TURNS, "images": [[i] for i in range(8)]})
    with pytest.raises(ValueError, match=r"field 'images' holds no text .* with hf_dart\.training\.image_row\.$"):
        pack_dataset(rows, chat_tokenizer(), 3, 64)
    stream = datasets.Dataset.from_dict(ROWS["text"]).to_iterable_dataset()
    mapped, target = stream.map(lambda row: row), tiny_target(vocab_size=len(chat_tokenizer()))
    assert mapped.column_names is None
    head = tiny_head(target, draft_length=3)
    settings = DartTrainer.training_arguments(str(tmp_path), max_steps=14, report_to="none", save_strategy="no")
    given = {"processing_class": chat_tokenizer(), "max_length": 64}
    trainer = DartTrainer(head, target, settings, train_dataset=mapped, **given)
    trainer.train()
    assert trainer.state.global_step == 14  # over and over
    assert next(iter(pack_dataset(stream, chat_tokenizer(), 3, 64)))["input_ids"].shape == (64,)
