"""`hf-dart regenerate`: the target's own words, however often and by however many processes they are written."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chats import CONVERSATION, PLAIN, chat_tokenizer
from support.endpoint import serving
from support.tiny_training import tiny_target, write_json_lines

from hf_dart import DartHead, attach
from hf_dart.cli import main
from hf_dart.cli.regenerate import Tokens
from hf_dart.training import DataArguments, load_rows
from hf_dart.training.data.chat import ChatFormat
from hf_dart.training.regenerate.regenerate import RegenerateSettings, begin, open_sources, plan, regenerate
from hf_dart.training.regenerate.sampling import Sampling
from hf_dart.training.regenerate.writers import ModelWriter, ServerWriter

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()
MIXTURE = (Sampling(0.4, temperature=1.0), Sampling(0.3, repetition_penalty=1.1), Sampling(0.3))
SETTINGS = RegenerateSettings(length=24, new_tokens=12, prefix=(4, 9), mixture=MIXTURE, batch_size=4, seed=2)
TEXTS = [f"def f{i}(x):\n    return x + {i}\n" * (i % 4 + 1) for i in range(14)]


def small_writer(**options: Any) -> ModelWriter:
    """A random target with the packaged tokenizer's vocabulary, of which it uses little."""
    tokenizer = chat_tokenizer()
    model = tiny_target(torch.float64, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    with torch.no_grad():
        model.lm_head.weight[40:] *= 0.1
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 16, 17]
    return ModelWriter(model, tokenizer, ChatFormat(tokenizer), **options)


def text_file(folder: Path) -> str:
    return write_json_lines(folder / "texts.jsonl", [{"text": text} for text in TEXTS])


def sources_of(folder: Path, *names: str) -> Any:
    arguments = DataArguments(list(names), cache_dir=str(folder / "cache"), train_on="all")
    return open_sources(arguments, chat_tokenizer(), seed=3)


def records_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for part in sorted(folder.glob("*.jsonl")) for line in part.read_text().splitlines()]


def new_tokens(records: list[dict[str, Any]]) -> int:
    return sum(len(record["input_ids"]) - record["prompt_tokens"] for record in records)


def run(folder: Path, sources: Any, writer: Any, settings: RegenerateSettings = SETTINGS, **options: Any) -> Path:
    begin(folder, {}, {})
    for _ in regenerate(sources, writer, settings, folder, **options):
        pass
    return folder


def test_texts_are_continued_and_read_back(tmp_path: Path) -> None:
    writer, sources = small_writer(), sources_of(tmp_path, text_file(tmp_path))
    told: list[int] = []
    writer.tell = told.append
    out = run(tmp_path / "out", sources, writer)
    records = records_in(out)
    assert sum(told) == new_tokens(records)
    (documents, encoder), *_ = sources
    pieces = []
    for text in documents["text"]:
        ids = encoder.tokenizer(text)["input_ids"]
        pieces += [ids[at : at + 24] for at in range(0, len(ids), 24) if at == 0 or len(ids) - at >= 4]
    assert sorted(record["row"] for record in records) == list(range(len(pieces)))
    for record in records:
        given = record["prompt_tokens"]
        assert given <= 9
        assert record["input_ids"][:given] == pieces[record["row"]][:given]
        assert given < len(record["input_ids"]) <= 24
    assert len({record["sampling"] for record in records}) == 3

    rows, _ = load_rows(
        DataArguments([str(out)], max_length=24, cache_dir=str(tmp_path / "cache")), encoder.tokenizer, 3
    )
    trained = sum(int(row["loss_mask"].sum()) for row in rows)
    assert 0 < trained <= sum(len(record["input_ids"]) - record["prompt_tokens"] for record in records)


def test_greedy_text_is_what_generate_writes(tmp_path: Path) -> None:
    writer, sources = small_writer(), sources_of(tmp_path, text_file(tmp_path))
    settings = RegenerateSettings(length=24, prefix=(4, 9), batch_size=4)
    for record in records_in(run(tmp_path / "out", sources, writer, settings, rows=8)):
        prompt = record["input_ids"][: record["prompt_tokens"]]
        alone = writer.model.generate(torch.tensor([prompt]), max_new_tokens=24 - len(prompt), do_sample=False)
        length = len(record["input_ids"])
        assert alone[0, :length].tolist() == record["input_ids"]
        assert length == alone.shape[1] or record["input_ids"][-1] in writer.ends or length >= 24 - 9 + len(prompt)


def test_with_a_head_the_text_is_the_same(tmp_path: Path) -> None:
    sources = sources_of(tmp_path, text_file(tmp_path))
    plain = run(tmp_path / "plain", sources, small_writer(), rows=12)
    writer = small_writer()
    fields = {"draft_length": 3, "feature_layers": [1, 2], "initializer_range": 0.3, "tree": {"nodes": 6}}
    writer.head = DartHead.from_target(writer.model, **fields)
    attach(writer.model)
    told: list[int] = []
    writer.tell = told.append
    drafted = run(tmp_path / "drafted", sources, writer, rows=12)
    assert records_in(plain) == records_in(drafted)
    assert sum(told) == new_tokens(records_in(drafted))
    assert max(told) > 4  # more than one for each row
    assert writer.head.observers == ()
    assert writer.memory.tokens > sum(told), "drafts may copy what was written before"
    assert len(records_in(plain)) >= 12
    assert writer.head.last_stats.tau > 1


def test_an_interrupted_run_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    sources = sources_of(tmp_path, text_file(tmp_path))
    whole, out = run(tmp_path / "whole", sources, small_writer()), tmp_path / "out"
    begin(out, {}, {})
    steps = regenerate(sources, small_writer(), SETTINGS, out)
    next(steps)
    steps.close()
    first, *rest = sorted(file.name for file in whole.glob("*.jsonl"))
    assert [file.name for file in out.glob("*.jsonl")] == [first]  # as soon as it is told of
    (out / f"{rest[0]}.1234").write_text('{"text": "im')  # of a process that was killed while it wrote
    written = [number for number, _ in regenerate(sources, small_writer(), SETTINGS, out)]
    assert written == list(range(1, 1 + len(rest)))
    assert records_in(out) == records_in(whole)


def test_a_full_disk_keeps_the_text_so_far(tmp_path: Path) -> None:
    sources = sources_of(tmp_path, text_file(tmp_path))
    out, before = run(tmp_path / "out", sources, small_writer(), rows=4), resource.getrlimit(resource.RLIMIT_FSIZE)
    kept, names = records_in(out), set(out.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # where the system breaks the next batch off
    try:
        with pytest.raises(OSError, match="File too large"):
            run(out, sources, small_writer(), rows=8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert set(out.iterdir()) == names
    run(out, sources, small_writer(), rows=8)
    assert records_in(out)[: len(kept)] == kept
    assert len(records_in(out)) >= 8


def test_processes_share_the_batches(tmp_path: Path) -> None:
    sources, writer = sources_of(tmp_path, text_file(tmp_path)), small_writer()
    alone = records_in(run(tmp_path / "alone", sources, writer))
    for rank in (2, 0, 1):
        run(tmp_path / "shared", sources, writer, rank=rank, processes=3)
    shared = records_in(tmp_path / "shared")
    assert sorted(shared, key=lambda record: record["row"]) == sorted(alone, key=lambda record: record["row"])


def test_other_settings_do_not_mix(tmp_path: Path) -> None:
    for version in ("a", "b"):
        begin(tmp_path, {"seed": 0, "prefix": (1, 2)}, {"torch": version})
    with pytest.raises(ValueError, match=r"other settings: seed differs from .*settings.json; give the same"):
        begin(tmp_path, {"seed": 1, "prefix": (1, 2)}, {})
    (tmp_path / "batch-0000000.jsonl").write_text('{"text": "import os"}\n')
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"holds text, and no settings.json that says how it was made; name another"):
        begin(tmp_path, {"seed": 1, "prefix": (1, 2)}, {})


def chat_file(folder: Path) -> str:
    tool = [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "1"}]
    conversations = [
        CONVERSATION,
        CONVERSATION[:2],  # a prompt alone is answered
        [{"role": "assistant", "content": "Hello."}, *CONVERSATION[1:]],
        [*CONVERSATION[:3], {"role": "user", "content": "Try it."}, *tool],
        CONVERSATION[:1],  # nothing to answer
        [CONVERSATION[0], {"role": "user", "content": "long " * 200}],  # no room for a reply
    ]
    return write_json_lines(folder / "chats.jsonl", [{"messages": messages} for messages in conversations])


def test_conversations_get_new_replies_turn_by_turn(tmp_path: Path) -> None:
    writer, sources = small_writer(), sources_of(tmp_path, chat_file(tmp_path))
    settings = RegenerateSettings(length=120, new_tokens=12, prefix=(1, 2), batch_size=8)
    records = records_in(run(tmp_path / "out", sources, writer, settings))
    assert len(records) == 4
    replies = finished = 0
    for record in records:
        messages = [{name: value for name, value in m.items() if value is not None} for m in record["messages"]]
        assert messages[-1]["role"] == "assistant"
        for at, message in enumerate(messages):
            if message["role"] != "assistant" or at == 0:
                assert message["content"] in {"Hello.", "Try it.", *(m["content"] for m in CONVERSATION)}
                continue
            prompt = writer.tokenizer(writer.chat.render(messages[:at], prompt=True), return_tensors="pt")["input_ids"]
            written = writer.model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
            assert message["content"] == writer.tokenizer.decode(written, skip_special_tokens=True)
            replies += 1
            ended = int(written[-1]) in writer.ends
            finished += ended
            assert ended or at == len(messages) - 1
    assert replies > len(records)  # some had a second turn
    assert 0 < finished < replies

    rows, _ = load_rows(
        DataArguments([str(tmp_path / "out")], max_length=120, cache_dir=str(tmp_path / "cache")), writer.tokenizer, 3
    )
    assert len(rows) > 0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    with serving(small_writer()) as server:
        yield server


def test_a_server_writes_what_the_model_behind_it_writes(tmp_path: Path, server: Any) -> None:
    greedy = (Sampling(0.5), Sampling(0.5, repetition_penalty=1.2))
    texts = sources_of(tmp_path, text_file(tmp_path), chat_file(tmp_path))
    settings = RegenerateSettings(length=120, new_tokens=10, prefix=(4, 9), mixture=greedy, batch_size=4, seed=1)
    local = run(tmp_path / "local", texts, server.writer, settings)
    url = f"http://127.0.0.1:{server.server_port}"
    writer = ServerWriter(url, "small", server.writer.tokenizer, enable_thinking=False, requests=4, pause=0.01)
    server.faults = [503, "drop", 429]
    told: list[int] = []
    writer.tell = told.append
    remote = run(tmp_path / "remote", texts, writer, settings)
    assert sum(told) == new_tokens([record for record in records_in(remote) if "input_ids" in record])
    assert records_in(remote) == records_in(local)
    assert {body["model"] for body in server.seen} == {"small"}
    assert {body.get("repetition_penalty") for body in server.seen} == {None, 1.2}
    chats = [body for body in server.seen if "messages" in body]
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in chats)
    assert len({body["seed"] for body in server.seen}) > len(server.seen) / 2


@pytest.mark.parametrize("replies", [0, 1])
def test_a_call_of_a_tool_is_no_reply(tmp_path: Path, server: Any, replies: int) -> None:
    messages = [message for message in CONVERSATION if message["role"] != "system"]
    source = write_json_lines(tmp_path / "chat.jsonl", [{"messages": messages}])
    calls = {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    answers = [*[("stop", {"content": "Yes."})] * replies, ("tool_calls", calls)]
    choices = [{"message": {"role": "assistant", **said}, "finish_reason": reason} for reason, said in answers]
    server.faults = [json.dumps({"choices": [choice]}).encode() for choice in choices]
    writer = ServerWriter(f"http://127.0.0.1:{server.server_port}", "small", server.writer.tokenizer)
    settings = RegenerateSettings(length=120, new_tokens=12, prefix=(1, 2), batch_size=4)
    records = records_in(run(tmp_path / "out", sources_of(tmp_path, source), writer, settings))
    assert [record["messages"][-1]["content"] for record in records] == ["Yes."] * replies
    assert server.faults == []


def test_a_server_that_does_not_answer(server: Any) -> None:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    ask: Any = {"prompts": [[5, 6]], "new_tokens": 2, "sampling": Sampling(), "seed": 0}
    writer = ServerWriter(url, "small", server.writer.tokenizer, tries=3, pause=0.01)
    server.faults = [503, 503, 503]
    with pytest.raises(ConnectionError, match=r"did not answer in 3 tries .*give the same command again"):
        writer.continue_texts(**ask)
    server.faults = [404]
    with pytest.raises(ValueError, match=r"refuses a request to http://127.*: 404"):
        writer.continue_texts(**ask)
    server.faults = [b"no JSON", b'{"choices": []}']
    for address in (url, url, url.replace("/v1", "/other")):
        writer.url = address
        with pytest.raises(ValueError, match=r"does not answer as an OpenAI-style server does; fix the URL\."):
            writer.continue_texts(**ask)
    with pytest.raises(ValueError, match="The server's URL is 'localhost:8000'; give one such as http"):
        ServerWriter("localhost:8000", "small", writer.tokenizer)


RESPONSE = {
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
    with pytest.raises(ValueError, match=r"special token .<\|thought\|>.*response_template.*\.$"):
        reply()
    tokenizer.response_template = {
        **RESPONSE,
        "fields": {**RESPONSE["fields"], "content": {"close": tokenizer.decode(written[-1:])}},  # type: ignore[dict-item]
    }
    message, finished = reply()
    assert message == {"role": "assistant", "thinking": "add them", "content": "def add(a, b):\n    return a + b"}
    assert finished


def test_a_mixture_keeps_its_shares_and_short_conversations_have_no_start(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "x " * (n % 50)}]} for n in range(640)]
    source = write_json_lines(tmp_path / "many.jsonl", rows)
    batches = list(plan(sources_of(tmp_path, source), RegenerateSettings(batch_size=4)))
    assert [batch.number for batch in batches] == list(range(160))
    assert sorted(number for batch in batches for number, _ in batch.rows) == list(range(640))
    sizes = [[len(messages[0]["content"]) for _, (messages, _) in batch.rows] for batch in batches]
    assert all(max(size) - min(size) <= 20 for size in sizes)
    assert sum(map(sum, sizes[:16])) > 0.3 * sum(map(sum, sizes[:16][:8])) > 0


def test_ways_are_drawn_for_every_row(tmp_path: Path) -> None:
    """Rows draw ways by their shares, whichever batch they are in; a batch has one way, and all but few are full."""
    source = write_json_lines(tmp_path / "many.jsonl", [{"text": f"x = {n}"} for n in range(640)])
    settings = RegenerateSettings(batch_size=4, mixture=MIXTURE)
    batches = list(plan(sources_of(tmp_path, source), settings))
    assert sorted(number for batch in batches for number, _ in batch.rows) == list(range(640))
    ways = {number: batch.way for batch in batches for number, _ in batch.rows}
    counts = [sum(way == one for way in ways.values()) for one in range(3)]
    assert all(abs(count / 640 - way.share) < 0.06 for count, way in zip(counts, MIXTURE, strict=True))
    assert sum(ways[n] == ways[n + 1] for n in range(639)) < 0.5 * 639  # neighbours in the data draw on their own
    assert len(batches) < 1.3 * 640 / 4
    again = list(plan(sources_of(tmp_path, source), settings))
    assert [(batch.rows, batch.way) for batch in again] == [(batch.rows, batch.way) for batch in batches]


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
        ("1 top_p=0.9", "give a temperature too"),
    ):
        with pytest.raises(ValueError, match=match):
            Sampling.parse(text)
    for wrong in ({"prefix": (0, 5)}, {"prefix": (9, 5)}, {"prefix": (5, 2048)}, {"batch_size": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RegenerateSettings(**wrong)  # type: ignore[arg-type]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = text_file(tmp_path)
    words = ["regenerate", source, "--cache-dir", str(tmp_path / "cache"), "--output", str(tmp_path / "out")]
    words += ["--length", "16", "--prefix", "4", "8", "--batch-size", "4"]
    way = ["--mixture", "0.5 temperature=1", "0.5"]
    assert main([*words, *way, "--rows", "3"]) == 0
    shown = capsys.readouterr().err
    assert re.search(r"process 0: batch 0; now 4 rows, [\d.]+ a second; \d+ tokens, [\d.]+ a second", shown)
    counter = Tokens(rank=1, every=0.0)
    counter.add(1200)
    assert re.search(r"process 1: 1,200 tokens, [\d,.]+ a second", capsys.readouterr().err)
    assert main([*words, *way, "--rows", "3"]) == 0
    assert len(records_in(tmp_path / "out")) == 4
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert settings["settings"]["target"] == "packaged target"
    assert settings["settings"]["mixture"][0]["temperature"] == 1.0
    for wrong, said in (
        (["--temperature", "1"], "mixture differs"),
        (["--mixture", "1 top_p=0.5"], "give a temperature too"),
        ([*way, "--attn-implementation", "eager"], "attn_implementation differs"),
        (["--server", "http://127.0.0.1:1", "--head", "x"], "leave out --head"),
        (["--server", "http://127.0.0.1:1", "--quantization", '{"load_in_4bit": true}'], "leave out --quantization"),
        (["--server", "http://127.0.0.1:1", "--chat-template", "x"], "leave out --chat-template"),
        (["--model", "x"], "give --server"),
        (["--target", "./missing"], "There is no folder './missing'"),
        (["--text-field", "body"], "has no field 'body', only 'text'"),
        (["--length", "8"], "prefix is 4 to 8 tokens, of rows of length 8; give two numbers from 1 to 7, the smaller"),
    ):
        assert main([*words, *wrong]) == 2
        assert said in capsys.readouterr().err
    assert len(records_in(tmp_path / "out")) == 4
