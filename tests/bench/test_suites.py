"""Prompts to measure on: benchmarks by name, packaged suites, files of them, text that they are cut from."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.chats import chat_tokenizer
from support.sentences import assert_command_says, refused
from transformers import AutoTokenizer

from hf_dart.bench import speed, suites
from hf_dart.cli import main
from hf_dart.errors import UserError
from hf_dart.hub.loading import PACKAGED_TARGET


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(PACKAGED_TARGET)


def written(file: Path, *rows: Any) -> str:
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf8")
    return str(file)


def decoded(tokenizer: Any, name: str, count: int, **options: Any) -> dict[str, list[str]]:
    found = suites.open_suite(name, tokenizer, count, **options)
    return {category: [tokenizer.decode(ids) for ids in prompts] for category, prompts in found.items()}


def test_packaged_suites_are_whole(tokenizer: Any) -> None:
    for name in suites.PACKAGED:
        prompts = suites.open_suite(name, tokenizer, 8)[""]
        assert len({tuple(prompt) for prompt in prompts}) == 8
    assert max(map(len, suites.open_suite("code", tokenizer, 2, most=60)[""])) <= 60


def test_rows_of_all_kinds(tokenizer: Any, tmp_path: Path) -> None:
    turns = [("human", "def f("), ("gpt", "x):"), ("human", "return"), ("gpt", "x")]
    rows = [
        {"prompt": "import os"},
        {"question": "import sys"},
        {"messages": [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "class A:"}]},
        {"conversations": [{"from": who, "value": what} for who, what in turns]},
    ]
    marked = "\ufeff" + json.dumps(rows[0])  # as editors on Windows begin a file
    found = decoded(tokenizer, written(tmp_path / "mine.jsonl", marked, *rows[1:]), 4)
    assert found == {"": ["import os", "import sys", "Be terse.\n\nclass A:", "def f(\n\nx):\n\nreturn"]}


ROWS = {
    "gsm8k": {"question": "How many?", "answer": "3"},
    "humaneval": {"task_id": "a", "prompt": "def f(x):", "canonical_solution": "return x"},
    "mbpp": {"task_id": 1, "text": "Write f.", "code": "def f(): ..."},
    "math500": {"problem": "What is x?", "solution": "3", "subject": "Algebra"},
    "mt-bench": {"prompt": ["Write it.", "Again."], "category": "writing"},
    "spec-bench": {"question_id": 1, "turns": ["Write it.", "Again."], "category": "rag"},
    "speed-bench": {"turns": ["Write it.", "Again."], "category": "coding", "sub_category": "x"},
}


def test_every_benchmark_by_its_name(tmp_path: Path) -> None:
    """Requests go through the template, what is to be continued does not, later turns follow the answers."""
    chat = chat_tokenizer()

    def framed(*said: str) -> str:
        messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
        return chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    asked: list[str] = []

    def answer(ids: list[int]) -> list[int]:
        asked.append(chat.decode(ids))
        return chat("import os", add_special_tokens=False)["input_ids"]

    assert ROWS.keys() == suites.NAMED.keys()
    for name, row in ROWS.items():
        file = written(tmp_path / f"{name}.jsonl", row)
        said = [*(row.get("turns") or row.get("prompt") or row.get("question") or row.get("text") or row["problem"],)]
        said = said[0] if isinstance(said[0], list) else said
        found = decoded(chat, f"{name}={file}", len(said), answer=answer)
        wanted = said if name == "humaneval" else [framed(said[0])]
        if len(said) > 1:
            wanted = [*wanted, framed(said[0], "import os", said[1])]
            assert asked.pop() == wanted[0]
        assert not asked
        assert found == {row.get("category", ""): wanted}


def test_categories_apart_and_one_bad_row(tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    many = [{"question": f"x{number}", "category": "a"} for number in range(3)]
    few = '{"question": "y\u2028z", "category": "b"}'  # which other readers take for the end of a line
    file = written(tmp_path / "mine.jsonl", many[0], "{", many[1], few, {"question": 3}, many[2])
    with caplog.at_level(logging.WARNING):
        assert decoded(tokenizer, file, 2, least=2) == {"a": ["x0", "x1"]}
    assert "2 rows of" in caplog.text
    assert "Line 2 is not JSON" in caplog.text
    assert "Categories with less than 2 prompts are left out: 'b'." in caplog.text
    assert decoded(tokenizer, file, 2) == {"a": ["x0", "x1"], "b": ["y\u2028z"]}


@pytest.mark.parametrize("name", ["file", "folder"])
def test_whatever_datasets_reads_is_a_suite(name: str, tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([{"problem": "import os"}, {"problem": "class A:"}]), encoding="utf8")
    found = decoded(tokenizer, f"math500={file if name == 'file' else tmp_path}", 2)
    assert found == {"": ["import os", "class A:"]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Line 1 is not JSON"),
        ("[" * 100_000, "Line 1 is not JSON"),
        ("3", "has none of the fields"),
        ('{"prompt": 3}', "holds no text"),
        ('{"messages": "hello"}', "These are no messages"),
        ('{"messages": [{"content": "hello"}]}', "cannot be read"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "holds no text"),
        ('{"messages": []}', "holds no prompt"),
        ('{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"]}', "has a placeholder there"),
        ('{"prompt": "import os"}', "ask for fewer"),
    ],
)
def test_what_is_no_suite_is_refused(line: str, message: str, tokenizer: Any, tmp_path: Path) -> None:
    refused(lambda: suites.open_suite(written(tmp_path / "mine.jsonl", line), tokenizer, 2), UserError, message)


def test_text_that_has_to_be_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(lambda: suites.open_suite("spec-bench", tokenizer, 2), UserError, "name its file, as --suite spec-bench=")
    refused(lambda: suites.open_suite("gsm8k=", tokenizer, 2), UserError, "names no file")
    monkeypatch.setattr(suites, "find_spec", lambda name: None)  # pytest is not installed
    refused(lambda: suites.texts(), UserError, "give --text FILES")


def test_text_that_is_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "story.txt"
    text.write_text("x = 1\n", encoding="utf8")
    assert_command_says(["bench", "--smoke", "--text", str(text)], "too short", capsys)


def test_the_flag_for_thinking_reaches_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def opened(*given: Any, flags: Any, **options: Any) -> Any:
        asked.append(flags)
        raise UserError("That is all.")

    monkeypatch.setattr(suites, "open_suite", opened)
    for flag in ([], ["--thinking"], ["--no-thinking"]):
        main(["bench", "--smoke", "--suite", "code", *flag])
    assert asked == [{}, {"enable_thinking": True}, {"enable_thinking": False}]


def test_an_interrupted_bench_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured stays, whatever row is bad; another command starts over, as one that has ended does."""
    suite = written(tmp_path / "mine.jsonl", {"prompt": "import os"}, "{", {"prompt": "class A:"})
    file, own, asked = tmp_path / "bench.json", speed.measure, list[int]()
    words = ["bench", "--smoke", "--suite", "code", suite, "math", "--modes", "greedy", "--repeats", "1"]
    words += ["--batch", "2", "--json", str(file), "--new-tokens"]

    def measure(*given: Any, **options: Any) -> Any:
        asked.append(0)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return own(*given, **options)

    monkeypatch.setattr(speed, "measure", measure)
    assert main([*words, "4"]) == 130
    before = json.loads(file.read_text())
    assert list(dict.fromkeys(one["text"] for one in before["results"])) == ["code", "mine.jsonl"]
    assert main([*words, "4"]) == 0
    ended = json.loads(file.read_text())
    assert len(asked) == 4
    assert ended["results"][: len(before["results"])] == before["results"]
    assert ended["text"] == "code, mine.jsonl, math"
    for tokens, calls in (("4", 7), ("5", 10)):
        file.write_text(json.dumps(ended if tokens == "4" else before))
        assert main([*words, tokens]) == 0
        assert len(asked) == calls
