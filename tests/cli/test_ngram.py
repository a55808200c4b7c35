"""`hf-dart ngram`: tables built, merged and looked at, and one sentence for what is wrong."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from support.ngrams import by_hand, unpacked
from support.sentences import assert_command_says
from support.tiny_training import largest_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_dart import NgramTable
from hf_dart.cli import main
from hf_dart.errors import UserError, as_user_error
from hf_dart.hub.loading import PACKAGED_TARGET


def test_build_merge_and_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(path) for path in sorted(Path(__file__).parent.glob("t*.py"))[:4]]
    first, second, merged, ids = (str(tmp_path / name) for name in ("first", "second", "merged", "ids.npy"))
    assert main(["ngram", "build", first, "--text", *files[:2], "--order", "4"]) == 0
    assert re.search(r"built in \d+\.\d s: \d+ s per 10\^9 tokens", capsys.readouterr().out)
    assert main(["ngram", "build", second, "--text", *files[2:], "--order", "4"]) == 0
    assert main(["ngram", "merge", merged, first, second, "--min-counts", "1,2"]) == 0
    assert main(["ngram", "merge", second, second]) == 0, "in place"
    assert main(["ngram", "info", merged, "--tokenizer", str(PACKAGED_TARGET)]) == 0
    shown = capsys.readouterr().out
    assert "counts from 1, 2, 2 on kept" in shown
    assert "up to order 4" in shown
    assert re.search(r"\d+\.\d MB, \d+\.\d\d bytes per n-gram", shown)
    np.save(ids, np.array([1, 2, 0, 1, 2, 0]))
    assert main(["ngram", "build", first, "--tokens", ids]) == 0
    assert unpacked(NgramTable.load(first)) == by_hand([[1, 2, 0]] * 2, 3)
    assert main(["ngram", "build", first, "--tokens", ids, "--vocab-size", "9"]) == 0
    assert main(["ngram", "info", first, "--tokenizer", str(PACKAGED_TARGET)]) == 0
    assert NgramTable.load(first).spec.vocab_size == 9
    np.array([1, 2, 0], dtype=np.uint16).tofile(tmp_path / "raw")
    assert main(["ngram", "build", first, "--tokens", str(tmp_path / "raw")]) == 0
    assert NgramTable.load(first).tokens == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["build", "{}/t", "--text", "{}/none"], "Cannot read"),
        (["build", "{}/t", "--text", os.devnull], "There is nothing to count"),
        (["build", "{}/none/t", "--text", __file__], "There is no folder"),
        (["build", "{}/t", "--text", __file__, "--order", "5"], "give 2 to 4"),
        (["build", "{}/t", "--text", __file__, "--tokenizer", "{}/none"], "There is no folder"),
        (["build", "{}/t", "--tokens", "{}/none"], "Cannot read"),
        (["info", "{}/none"], "There is no file"),
        (["info", __file__], "cannot be read as an n-gram table"),
        (["merge", "{}/t", "{}/none"], "There is no file"),
        (["build", "{}", "--text", __file__], "is a folder"),
    ],
)
def test_one_sentence_for_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["ngram", *(word.replace("{}", str(tmp_path)) for word in words)]) == 2
    shown = capsys.readouterr().err.strip().splitlines()[-1]
    assert shown.startswith("hf-dart: ")
    assert message in shown
    assert not list(tmp_path.iterdir())


def test_ids_of_16_bits_hold_no_large_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = Tokenizer(models.WordLevel({f"t{number}": number for number in range(2**16 + 1)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=large, eos_token="t0").save_pretrained(tmp_path / "tokenizer")
    ids = np.array([1, 2**16, 0, 1, 2**16, 0], dtype=np.uint32)
    ids.tofile(tmp_path / "raw")
    np.save(tmp_path / "ids.npy", ids)
    words = ["ngram", "build", str(tmp_path / "t"), "--tokenizer", str(tmp_path / "tokenizer"), "--tokens"]
    assert_command_says([*words, str(tmp_path / "raw")], "save them as a .npy file", capsys)
    (tmp_path / "raw").rename(tmp_path / "raw.bin")
    for rows in (tmp_path / "raw.bin", f"{tmp_path}/*.bin"):
        assert_command_says([*words[:-1], "--column", "input_ids", "--dataset", str(rows)], "16-bit ids", capsys)
    assert main([*words, str(tmp_path / "ids.npy")]) == 0
    assert unpacked(NgramTable.load(tmp_path / "t")) == by_hand([[1, 2**16, 0]] * 2, 3)


def test_data_sets_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("datasets")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"body": text}) + "\n" for text in ("import os", "import sys")))
    out = str(tmp_path / "table")
    words = ["ngram", "build", out, "--dataset", str(rows), "--column", "body"]
    assert_command_says(words[:-2], "no column 'text' but body; name one with --column.", capsys)
    assert main(words) == 0
    assert NgramTable.load(out).tokens >= 6
    np.array([1, 2, 0, 1, 2, 0], dtype=np.uint16).tofile(tmp_path / "ids.bin")
    assert main(["ngram", "build", out, "--dataset", str(tmp_path / "ids.bin"), "--column", "input_ids"]) == 0
    assert unpacked(NgramTable.load(out)) == by_hand([[1, 2, 0]] * 2, 3)


def test_a_full_disk_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which NumPy's own `tofile` does not say."""
    with largest_file(4096):
        assert main(["ngram", "build", str(tmp_path / "table"), "--text", __file__]) == 2
    assert "File too large" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"^The disk is full; make room"), as_user_error():
        Path("/dev/full").write_text("x")
