"""Prompts to measure on: packaged suites, files of them, text that they are cut from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hf_dart.bench import suites
from hf_dart.cli import main
from hf_dart.errors import UserError
from hf_dart.hub.loading import PACKAGED_TARGET


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(PACKAGED_TARGET)


def test_packaged_suites_are_whole(tokenizer: Any) -> None:
    for name in suites.PACKAGED:
        prompts = suites.open_suite(name, tokenizer, 8)
        assert len({tuple(prompt) for prompt in prompts}) == 8
    assert max(map(len, suites.open_suite("code", tokenizer, 2, most=60))) <= 60


def test_rows_of_all_kinds(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    turns = [("human", "def f("), ("gpt", "x):"), ("human", "return"), ("gpt", "x")]
    rows = [
        {"prompt": "import os"},
        {"question": "import sys"},
        {"messages": [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "class A:"}]},
        {"conversations": [{"from": who, "value": what} for who, what in turns]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf8")
    prompts = suites.open_suite(str(file), tokenizer, 4)
    assert [tokenizer.decode(ids) for ids in prompts] == ["import os", "import sys", "class A:", "return"]


@pytest.mark.matrix
def test_whatever_datasets_reads_is_a_suite(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([{"problem": "import os"}, {"problem": "class A:"}]), encoding="utf8")
    prompts = suites.open_suite(str(file), tokenizer, 2)
    assert [tokenizer.decode(ids) for ids in prompts] == ["import os", "class A:"]


def test_a_chat_template_frames_requests(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED_TARGET)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>"
        "{% endif %}"
    )
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"question": "x = 1"}), encoding="utf8")
    (ids,) = suites.open_suite(str(file), tokenizer, 1)
    assert tokenizer.decode(ids) == "<user>x = 1<assistant>"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Line 1 of .* is not JSON"),
        ("[" * 100_000, "Line 1 of .* is not JSON"),
        ("3", "has none of the fields"),
        ('{"prompt": 3}', "holds no text"),
        ('{"messages": "hello"}', "These are no messages"),
        ('{"messages": [{"content": "hello"}]}', "cannot be read"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "holds no text"),
        ('{"messages": []}', "has 0 prompts"),
        ('{"prompt": "import os"}', "ask for fewer"),
    ],
)
def test_what_is_no_suite_is_refused(line: str, message: str, tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(line, encoding="utf8")
    with pytest.raises(UserError, match=message):
        suites.open_suite(str(file), tokenizer, 2)


def test_text_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "story.txt"
    text.write_text("\n".join(f"x{i} = {i}  # the number {i}" for i in range(200)), encoding="utf8")
    words = ["bench", "--smoke", "--text", str(text), "--repeats", "1", "--new-tokens", "4", "--batch", "2"]
    assert main(words) == 0
    assert "story.txt" in capsys.readouterr().out
    text.write_text("x = 1\n", encoding="utf8")
    assert main(words) == 2
    assert "too short" in capsys.readouterr().err


def test_without_pytest_the_text_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="name files with --text"):
        suites.texts()
