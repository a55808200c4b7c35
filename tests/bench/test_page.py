"""`hf-dart view`: pages that say what a call did, whatever the tokens are."""

from __future__ import annotations

import html
from collections import Counter
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
import torch
from support.sentences import assert_command_says, refused
from support.tiny import VOCABULARY, ReplayDrafter, prompts, tiny_head, tiny_target
from support.users import TOKENIZER
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_dart import attach
from hf_dart.bench.page import View, origins, token_texts
from hf_dart.cli import main
from hf_dart.decoding.stats import DraftStats

_ALLOWED = {
    "html", "head", "base", "meta", "title", "style", "body", "h1", "h2", "p", "span", "pre", "a", "table", "caption",
    "tr", "td", "div", "details", "summary", "iframe",
}  # fmt: skip


def read(page: str) -> Element:
    """The elements of a page, which is well-formed, loads nothing and runs nothing."""
    root = ElementTree.fromstring(page)
    for element in root.iter():
        assert element.tag in _ALLOWED, element.tag
        assert element.tag != "style" or not {"url(", "@import"} & set(element.text.split())
        for name, value in element.attrib.items():
            assert not name.startswith("on"), name
            assert name not in ("src", "srcset", "action", "data"), name
            assert name != "href" or value.startswith("#") or (element.tag, value) == ("base", "about:srcdoc"), value
            assert "//" not in value or name in ("title", "srcdoc"), (name, value)
        if "srcdoc" in element.attrib:
            read(element.get("srcdoc"))
    return root


def text_of(element: Element) -> str:
    return "".join(element.itertext())


# ---- pages ---------------------------------------------------------------------------------------------------

HOSTILE = [
    "<script>alert(1)</script>", "</pre>", '" onmouseover="alert(1)', "&lt;", "'", "]]>", "<!--", "\x00", "\x1b[31m",
    "\u2028", "\u202e", "</svg>", "\r", "javascript:alert(1)", "{{", "\\", "<", "&", "\U0001f600",
]  # fmt: skip


@pytest.fixture(scope="module")
def hostile_tokenizer() -> Any:
    words = [*HOSTILE, *(f" w{i}" for i in range(VOCABULARY - len(HOSTILE)))]
    model = WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[-1])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def output() -> Any:
    """Two ragged rows, one of which ends early."""
    target = tiny_target("llama")
    head = tiny_head(target)
    torch.manual_seed(2)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 40, "eos_token_id": 3, "pad_token_id": 0}
    kept = {"return_dict_in_generate": True, "trace": True}
    output = target.generate(**prompts([9, 4]), assistant=head, **options, **kept)
    assert output.draft_stats.tau > 1.2
    return output


@pytest.mark.parametrize("row", [0, 1])
def test_a_page_shows_what_the_call_did(output: Any, hostile_tokenizer: Any, row: int) -> None:
    view = View.of(output, hostile_tokenizer, row, notes=("<b>a note</b>",))
    committed = [counts[row] for counts in output.draft_stats.committed]
    written = 1 + sum(committed)
    assert view.tokens == output.sequences[row, 9 : 9 + written].tolist()
    page = read(view.html())
    text = page.find(".//pre[@id='text']")
    begin, decode = view.prompt[-8:], view.tokenizer.decode
    whole = decode(view.prompt) + decode(begin + view.tokens)[len(decode(begin)) :]
    shown = "".join(c if c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in whole)
    assert text_of(text) == shown.replace("\r", "\n")  # as browsers read it
    marks = [one.get("class") == "draft" for one in [*text][1:]]
    assert marks == [drafted for _, drafted in origins(written, committed)]

    rounds = [(number, count) for number, count in enumerate(committed) if count]
    drawn = page.findall(".//details")
    # Inside what opens, so that a link opens it.
    ids = [part.get("id") for part in page.findall(".//details/div")]
    assert ids == [f"round-{number + 1}" for number, _ in rounds]
    assert {link.get("href")[1:] for link in page.iter("a")} <= {*ids}
    for (number, count), one in zip(rounds, drawn, strict=True):
        traced = output.draft_stats.trace.rounds[number]
        boxes = Counter(box.get("class") for box in one.iter("span"))
        nodes, path = sum(parent >= 0 for parent in traced.parents[row]), traced.paths[row]
        assert boxes == Counter({"root": 1, "bonus": 1, "draft": count - 1, "left": nodes - (count - 1)})
        assert [traced.parents[row][node] for node in path[1:]] == path[:-1]
        assert nodes == 0 or f"{exp(traced.scores[row][1]):.0%}" in text_of(one)


def test_a_note_is_text_and_a_notebook_gets_a_frame(output: Any, hostile_tokenizer: Any) -> None:
    view = View.of(output, hostile_tokenizer, notes=("<b>a note</b>",))
    assert "&lt;b&gt;a note&lt;/b&gt;" in view.html()
    frame = view._repr_html_()
    assert frame.startswith("<iframe srcdoc=")
    assert frame.count("<") == 2
    read(frame)
    inside = html.unescape(frame.partition('srcdoc="')[2].partition('"')[0])
    assert inside.replace('\n<base href="about:srcdoc" />', "") == view.html()
    statistics = read(f"<div>{output.draft_stats._repr_html_()}</div>")
    assert f"{output.draft_stats.tau:.2f}" in text_of(statistics)


def test_rounds_without_a_draft_are_those_that_were_not_drafted() -> None:
    """A drafted round may verify the root alone, and copies are verified without a draft."""
    stats = DraftStats()
    for nodes, drafted in ((0, True), (3, False), (7, True), (0, False), (3, False)):
        stats.count([1], [nodes], drafted)
    assert stats.plain_rounds == 2
    assert "5, 3 of them without a draft" in stats._repr_html_()


def test_every_hostile_token_stays_text(output: Any, hostile_tokenizer: Any, tmp_path: Path) -> None:
    view = View.of(output, hostile_tokenizer)
    every = View(hostile_tokenizer, list(range(len(HOSTILE))), view.tokens, view.stats)
    page = read(every.html())
    shown = text_of(page.find(".//pre[@id='text']"))
    assert "<script>alert(1)</script>" in shown
    assert "\x00" not in every.html()
    every.save(tmp_path / "page.html")
    read((tmp_path / "page.html").read_text(encoding="utf8"))


def test_rounds_have_the_times_of_the_call() -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    target.generate(**prompts([7]), assistant=head, do_sample=False, max_new_tokens=12, trace=True)
    rounds = head.last_stats.trace.rounds
    assert len(rounds) == head.last_stats.rounds
    told = {name: sum(one.seconds[name] for one in rounds) for name in rounds[0].seconds}
    assert 0 < told.pop("commit") < head.last_stats.seconds["commit"]  # the last round's had not ended
    assert told == pytest.approx({name: head.last_stats.seconds[name] for name in told})


@pytest.mark.parametrize("row", [0, 1])
def test_rows_that_ran_ahead_of_the_end(row: int) -> None:
    """Without end tokens every row runs on until all have stopped, and a round may pass that place."""
    target = tiny_target("llama")
    inputs = prompts([9, 4])
    known = target.generate(**inputs, do_sample=False, max_new_tokens=60)
    drafter = ReplayDrafter(known, [0, 5], VOCABULARY, misses=[0.0, 0.9])
    stops = TOKENIZER.decode(known[0, 9 + 4 : 9 + 6]), TOKENIZER.decode(known[1, 9 + 19 : 9 + 21])
    options = {"do_sample": False, "max_new_tokens": 60, "stop_strings": list(stops), "tokenizer": TOKENIZER}
    options |= {"return_dict_in_generate": True, "pad_token_id": 0}
    output = attach(target).generate(**inputs, assistant=drafter, trace=True, **options)
    assert torch.equal(output.sequences, target.generate(**inputs, **options).sequences)
    wrote = [1 + sum(counts[each] for counts in output.draft_stats.committed) for each in range(2)]
    assert max(wrote) > output.sequences.shape[1] - 9, "no row was ahead"
    view = View.of(output, TOKENIZER, row)
    assert view.prompt == inputs["input_ids"][row].tolist()  # this tokenizer has no pad
    assert view.tokens == output.sequences[row, 9 : 9 + len(view.tokens)].tolist()
    assert len(view.tokens) == min(wrote[row], output.sequences.shape[1] - 9)
    assert 1 + sum(len(one.paths[row]) for one in view.rounds) == len(view.tokens)
    view.html()


def test_drafted_tokens_of_rounds_and_what_cannot_be_shown(output: Any, hostile_tokenizer: Any) -> None:
    drafted = [(-1, False), (0, True), (0, True), (0, False), (1, False), (2, True), (2, False)]
    assert origins(7, [3, 1, 2]) == drafted
    assert origins(3, [3]) == drafted[:3]
    refused(lambda: View.of(output.sequences, hostile_tokenizer), ValueError, "trace=True")
    refused(lambda: View.of(output, hostile_tokenizer, row=2), ValueError, r"give one of 0\.\.1")


def test_tokens_that_are_parts_of_characters_or_change_what_stood_in_front() -> None:
    cleaning = SimpleNamespace(decode=lambda ids, **_: "".join([" a", " ,", " b"][i] for i in ids).replace(" ,", ","))
    assert token_texts(cleaning, [], [0, 1, 2]) == [" a", ",", " b"]
    byte_level = SimpleNamespace(decode=lambda ids, **_: bytes(ids).decode("utf8", errors="replace"))
    ids = list("naïve 😀 e".encode())
    pieces = token_texts(byte_level, [], ids)
    assert "".join(pieces) == "naïve 😀 e"
    assert pieces[ids.index(0xF0) : ids.index(0xF0) + 4] == ["", "", "", "😀"]
    assert "".join(token_texts(byte_level, ids[:1], ids[1:-4])) == "aïve \N{REPLACEMENT CHARACTER}"


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    words = ["view", "import os\n\n\ndef ", "--temperature", "1", "--max-new-tokens", "32", "--output"]
    assert main([*words, str(file)]) == 0
    page = read(file.read_text(encoding="utf8"))
    assert "The same text as stock's: yes" in text_of(page)
    assert text_of(page.find(".//pre[@id='text']")).startswith("import os\n\n\ndef ")
    capsys.readouterr()
    assert_command_says([*words, str(tmp_path / "none" / "page.html")], "No such file or directory", capsys)
