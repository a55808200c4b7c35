"""Text that comes token by token is the text of all tokens, in whole characters, up to a stop string."""

from __future__ import annotations

from typing import Any

import pytest
from support.users import TOKENIZER
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_dart.hub.loading import load_tokenizer
from hf_dart.serve.detokenizer import Detokenizer

TEXTS = ["def f(x):\n    return x", "naïve — 東京 🙂🙂 ﷽", "a  b\t\n\n  c", "🙂", "\ufffd\ufffdend\ufffd"]


def by_bytes() -> Any:
    """A tokenizer of single bytes, as Llama falls back to them, with spaces as Metaspace has them."""
    tokens = {"<unk>": 0, "▁": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    backend = Tokenizer(models.BPE(tokens, [], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def shown(tokenizer: Any, ids: list[int], stops: list[str] = []) -> tuple[list[str], Detokenizer]:  # noqa: B006
    text = Detokenizer(tokenizer, stops)
    pieces = [text.add(token) for token in ids]
    return [*pieces, text.end()], text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [load_tokenizer(), by_bytes()], ids=["byte level", "byte fallback"])
def test_whole_characters(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces, _ = shown(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    if len(ids) > 8 and "\ufffd" not in text:
        assert sum(map(bool, pieces)) > 2  # as it comes, not at the end


@pytest.mark.parametrize("tokenizer", [load_tokenizer(), by_bytes()], ids=["byte level", "byte fallback"])
def test_a_text_goes_on(tokenizer: Any) -> None:
    """From what is before it: decoders drop a space where a text begins."""
    ids = tokenizer("a 東 b  🙂 京c 🙂", add_special_tokens=False)["input_ids"]
    for place in range(len(ids)):
        before = tokenizer.decode(ids[:place])
        if not before.endswith("\ufffd"):
            text = Detokenizer(tokenizer, (), before=ids[:place])
            assert before + "".join(map(text.add, ids[place:])) + text.end() == tokenizer.decode(ids)


def test_bytes_that_are_no_text() -> None:
    """Bytes come with the next character, or at the end; what has been shown before stays."""
    tokenizer = by_bytes()
    for raw in (b"\xff\xfe\xfd", b"\xe2\x82", b"\xe6\x9d\xb1\xe4\xba\xac\xf0\x9f"):
        ids = [byte + 2 for byte in raw]
        pieces, _ = shown(tokenizer, ids)
        whole = "".join(pieces)
        assert whole.strip("\ufffd") in ("", "東京")
        assert whole.endswith("\ufffd")


@pytest.mark.parametrize(
    ("stops", "left"),
    [(["cde"], "ab"), (["x", "ef", "de"], "abc"), (["abcdefg"], ""), (["gh", "g"], "abcdef"), (["fgx"], "abcdefg")],
)
def test_stop_strings(stops: list[str], left: str) -> None:
    """None of a stop string is shown, and nothing held back is lost where there is none."""
    ids = TOKENIZER("abcdefg")["input_ids"]
    pieces, text = shown(TOKENIZER, ids, stops)
    assert "".join(pieces) == left
    assert text.stopped == (left != "abcdefg")


def test_a_stop_string_inside_a_token() -> None:
    tokenizer = load_tokenizer()
    ids = tokenizer("import numpy")["input_ids"]
    pieces, text = shown(tokenizer, ids, ["mpo"])
    assert ("".join(pieces), text.stopped) == ("i", True)
