"""`hf-dart regenerate`: the target's own words, however often and by however many processes they are written."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.chats import CONVERSATION, PLAIN, chat_tokenizer
from support.sentences import refused
from support.tiny_training import largest_file, tiny_head, tiny_target, write_json_lines

from hf_dart.cli import main
from hf_dart.models.tokenizers import end_tokens
from hf_dart.training import DataArguments, load_rows
from hf_dart.training.regenerate.sampling import Sampling
from hf_dart.training.regenerate.shards import keep_settings, open_sources, regenerate
from hf_dart.training.regenerate.writer import RegenerateSettings, as_message

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()
TOKENIZER = chat_tokenizer()
MIXTURE = (Sampling(0.4, temperature=1.0), Sampling(0.3, repetition_penalty=1.1), Sampling(0.3))
SETTINGS = RegenerateSettings(length=24, new_tokens=12, prefix=(4, 9), mixture=MIXTURE, seed=2)
TEXTS = [f"def f{i}(x):\n    return x + {i}\n" * (i % 4 + 1) for i in range(14)]
# A random target with the packaged tokenizer's vocabulary, of which it uses little.
MODEL = tiny_target(torch.float64, vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id)
MODEL.lm_head.weight.data[40:] *= 0.1
MODEL.generation_config.eos_token_id = [TOKENIZER.eos_token_id, 16, 17]
ENDS = {*end_tokens(MODEL, TOKENIZER)}


def sources_of(folder: Path, rows: list[dict[str, Any]]) -> Any:
    source = write_json_lines(folder / "data.jsonl", rows)
    arguments = DataArguments([source], cache_dir=str(folder / "cache"), train_on="all")
    return open_sources(arguments, TOKENIZER, seed=3)


@pytest.fixture
def texts(tmp_path: Path) -> Any:
    return sources_of(tmp_path, [{"text": text} for text in TEXTS])


def records_in(folder: Path) -> list[dict[str, Any]]:
    """The records of all shards, in the order of their rows."""
    lines = [line for part in folder.glob("*.jsonl") for line in part.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda record: record["row"])


def run(folder: Path, sources: Any, settings: RegenerateSettings = SETTINGS, head: Any = None, **options: Any) -> Path:
    keep_settings(folder, {}, {})
    told = list(regenerate(sources, MODEL, head, settings, folder, **{"seats": 4, **options}))
    assert all(record in records_in(folder) for record in told)
    return folder


def test_texts_are_what_generate_writes_with_a_seed_for_each_row(tmp_path: Path, texts: Any) -> None:
    """The reference draws for every row what is random about it, and calls stock's `generate` of it alone."""
    ((documents, _),) = texts
    pieces = []
    for text in documents["text"]:
        ids = TOKENIZER(text)["input_ids"]
        pieces += [ids[at : at + 24] for at in range(0, len(ids), 24) if at == 0 or len(ids) - at >= 4]
    out = run(tmp_path / "out", texts)
    records = records_in(out)
    assert [record["row"] for record in records] == list(range(len(pieces)))
    assert {record["sampling"] for record in records} == {0, 1, 2}
    for number, (record, piece) in enumerate(zip(records, pieces, strict=True)):
        random = np.random.default_rng([SETTINGS.seed, number])
        way = int(random.choice(3, p=[0.4, 0.3, 0.3]))
        prefix = int(random.integers(4, 10))
        prompt = torch.tensor([piece[:prefix]])
        torch.manual_seed(int(random.integers(2**31)))
        how = {"do_sample": way == 0, "top_k": 0, "repetition_penalty": 1.1 if way == 1 else 1.0}
        alone = MODEL.generate(prompt, max_new_tokens=min(24 - prefix, 12), pad_token_id=0, **how)
        assert record["input_ids"] == alone[0].tolist()
        assert record["prompt_tokens"] == prompt.shape[1] == len(record["input_ids"]) - record["new_tokens"]
        assert (record["sampling"], record["text"]) == (way, TOKENIZER.decode(alone[0], skip_special_tokens=True))

    arguments = DataArguments([str(out)], max_length=24, cache_dir=str(tmp_path / "cache"))
    trained = sum(int(row["loss_mask"].sum()) for row in load_rows(arguments, TOKENIZER, 3)[0])
    assert 0 < trained <= sum(record["new_tokens"] for record in records)


def test_an_interrupted_run_and_one_on_a_full_disk_go_on_as_if_nothing_had_been(tmp_path: Path, texts: Any) -> None:
    whole, out = run(tmp_path / "whole", texts), tmp_path / "out"
    keep_settings(out, {}, {})
    steps = regenerate(texts, MODEL, None, SETTINGS, out, seats=3)
    first = [next(steps), next(steps)]
    steps.close()
    assert records_in(out) == first  # each as soon as it is told of
    file = out / "rows-1-of-1.jsonl"
    with file.open("a") as lines:
        lines.write('{"text": "im')  # of a process that was killed while it wrote
    assert not list(regenerate(texts, MODEL, None, SETTINGS, out, minutes=0))
    assert records_in(out) == first
    kept = records_in(run(out, texts, rows=4))
    # The system breaks the next row off.
    with largest_file(file.stat().st_size + 100), pytest.raises(OSError, match="File too large"):
        run(out, texts)
    assert records_in(out) == kept
    run(out, texts, seats=2)
    assert file.read_text() == (whole / file.name).read_text()


def test_shards_together_hold_the_rows_of_one_process(tmp_path: Path, texts: Any) -> None:
    """With a head, too, that drafts for the target."""
    alone, count = records_in(run(tmp_path / "alone", texts)), 3
    head = tiny_head(MODEL, draft_length=3, feature_layers=[1, 2], initializer_range=0.3, tree={"nodes": 6})
    for number in range(count, 0, -1):
        run(tmp_path / "shared", texts, head=head, shard=(number, count), seats=number)
    assert head.last_stats.tau > 1
    sizes = [len(file.read_text().splitlines()) for file in (tmp_path / "shared").glob("rows-?-of-?.jsonl")]
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert records_in(tmp_path / "shared") == alone
    read = DataArguments([str(tmp_path / "shared")], max_length=24, cache_dir=str(tmp_path / "cache"))
    assert len(load_rows(read, TOKENIZER, 3)[0]) > 0  # the folder is training data as it is


def test_targets_that_stop_at_strings(tmp_path: Path, texts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = records_in(run(tmp_path / "long", texts))[0]["input_ids"]
    monkeypatch.setattr(MODEL.generation_config, "stop_strings", [TOKENIZER.decode(ids[-3])])
    assert records_in(run(tmp_path / "short", texts))[0]["new_tokens"] < SETTINGS.new_tokens - 1


def test_conversations_get_new_replies_turn_by_turn(tmp_path: Path) -> None:
    tool = [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "1"}]
    conversations = [
        CONVERSATION,
        CONVERSATION[:2],  # a prompt alone is answered
        [{"role": "assistant", "content": "Hello."}, *CONVERSATION[1:]],
        [*CONVERSATION[:3], {"role": "user", "content": "Try it."}, *tool],
        CONVERSATION[:1],  # nothing to answer
        [CONVERSATION[0], {"role": "user", "content": "long " * 200}],  # no room for a reply
    ]
    sources = sources_of(tmp_path, [{"messages": messages} for messages in conversations])
    settings = RegenerateSettings(length=120, new_tokens=12, prefix=(1, 2))
    out = run(tmp_path / "out", sources, settings)
    records = records_in(out)
    assert len(records) == 4
    replies = finished = 0
    chat = sources[0][1].chat
    for record in records:
        messages = [{name: value for name, value in m.items() if value is not None} for m in record["messages"]]
        assert messages[-1]["role"] == "assistant"
        tokens = 0
        for at, message in enumerate(messages):
            if message["role"] != "assistant" or at == 0:
                assert message["content"] in {"Hello.", "Try it.", *(m["content"] for m in CONVERSATION)}
                continue
            prompt = TOKENIZER(chat.render(messages[:at], prompt=True), return_tensors="pt")["input_ids"]
            written = MODEL.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
            assert message["content"] == TOKENIZER.decode(written, skip_special_tokens=True)
            ended = int(written[-1]) in ENDS
            replies, finished, tokens = replies + 1, finished + ended, tokens + len(written)
            assert ended or at == len(messages) - 1
        assert record["new_tokens"] == tokens
    assert replies > len(records)  # some had a second turn
    assert 0 < finished < replies
    arguments = DataArguments([str(out)], max_length=120, cache_dir=str(tmp_path / "cache"))
    assert len(load_rows(arguments, TOKENIZER, 3)[0]) > 0


def test_parts_of_a_reply_are_told_apart() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|thought|>", "<|said|>"]})
    prompt = tokenizer.apply_chat_template(CONVERSATION[:2], chat_template=PLAIN, add_generation_prompt=True)
    text = "<|thought|>add them<|said|>def add(a, b):\n    return a + b"
    written = [*tokenizer(text, add_special_tokens=False)["input_ids"], min(ENDS)]
    with pytest.raises(ValueError, match=r"special token .<\|thought\|>.*response_template.*\.$"):
        as_message(tokenizer, ENDS, prompt["input_ids"], written)
    parts = {"thinking": {"open": "<|thought|>", "close": "<|said|>"}}
    parts["content"] = {"close": tokenizer.decode(written[-1:])}
    begins = {"start_anchor": "<assistant>\n", "defaults": {"role": "assistant"}}
    tokenizer.response_template = {**begins, "fields": parts}
    message = as_message(tokenizer, ENDS, prompt["input_ids"], written)
    assert message == {"role": "assistant", "thinking": "add them", "content": "def add(a, b):\n    return a + b"}


def test_sampling_reads_and_refuses() -> None:
    assert Sampling.parse("0.3 temperature=0.8 top_p=0.95 top_k=20") == Sampling(0.3, 0.8, 0.95, 20)
    assert Sampling.parse("1") == Sampling()
    for text, match in (
        ("temperature=1", "does not read like"),
        ("0.3 temperature", "does not read like"),
        ("0.3 heat=1", "Sampling has no 'heat'"),
        ("0 temperature=1", "share is 0.0; give a number above 0"),
        ("1 temperature=-1", "temperature is -1.0; give 0, or 1e-06 or more"),
        ("1 temperature=1e-320", "give 0, or 1e-06 or more"),
        ("1 temperature=nan", "temperature is nan"),
    ):
        refused(partial(Sampling.parse, text), ValueError, match)
    for wrong in ({"prefix": (0, 5)}, {"prefix": (9, 5)}, {"prefix": (5, 2048)}, {"new_tokens": 0}):
        refused(partial(RegenerateSettings, **wrong), ValueError, next(iter(wrong)))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_json_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS]), tmp_path / "out"
    words = ["regenerate", source, "--cache-dir", str(tmp_path / "cache"), "--output", str(out)]
    words += ["--length", "16", "--prefix", "4", "8", "--batch-size", "4", "--rows", "4"]
    way = ["--mixture", "0.5 temperature=1", "0.5"]
    (tmp_path / "config.json").write_text('{"target_name": "./gone"}')  # of a head
    assert main([*words, *way, "--shard", "1/2"]) == 0
    assert re.search(r"shard 1 of 2: 1 rows, \d+ tokens, [\d.]+ a second", capsys.readouterr().err)
    assert [record["row"] for record in records_in(out)] == [0, 2]
    with monkeypatch.context() as launched:  # as accelerate does for its second process
        launched.setenv("RANK", "1")
        launched.setenv("WORLD_SIZE", "2")
        assert main([*words, *way]) == 0
    assert "shard 2 of 2: 2 rows were added to" in capsys.readouterr().err
    assert [record["row"] for record in records_in(out)] == [0, 1, 2, 3]
    assert main([*words, *way, "--shard", "1/2", "--target", "packaged", "--head", "packaged"]) == 0
    settings = json.loads((out / "settings.json").read_text())["settings"]
    assert (settings["target"], settings["mixture"][0]["temperature"]) == ("packaged target", 1.0)
    for wrong, said in (
        ([*way], "shards differs"),
        (["--shard", "1/2", "--temperature", "1"], "mixture differs"),
        (["--mixture", "1 top_p=0.5"], "give a temperature too"),
        ([*way, "--shard", "1/2", "--attn-implementation", "eager"], "attn_implementation differs"),
        (["--target", "./missing"], "There is no folder './missing'"),
        (["--head", str(tmp_path)], "names './gone', which is not here; give --target"),
        (["--text-field", "body"], "has no field 'body', only 'text'"),
        (["--length", "8"], "prefix is 4 to 8 tokens, of rows of length 8; give two numbers from 1 to 7, the smaller"),
    ):
        assert main([*words, *wrong]) == 2
        assert said in capsys.readouterr().err
    rows = tmp_path / "short"
    short = ["regenerate", source, "--output", str(rows), "--length", "16"]
    assert main([*short, "--rows", "2"]) == 0
    with largest_file((rows / "rows-1-of-1.jsonl").stat().st_size + 250):
        assert main(short) == 2
    assert "shard 1 of 1: 1 rows were added to" in capsys.readouterr().err
    assert all(record["prompt_tokens"] <= 8 for record in records_in(rows))  # half of a row
    for wrong_shard in ("3/2", "0/2", "1", "x/2"):
        with pytest.raises(SystemExit):
            main([*words, "--shard", wrong_shard])
    assert len(records_in(out)) == 4
    (out / "settings.json").unlink()
    assert main([*words, *way]) == 2
    assert "holds text, and no settings.json that says how it was made; name another" in capsys.readouterr().err
