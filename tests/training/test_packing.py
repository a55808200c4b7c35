"""Rows to train on: packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_dart.training import PackedTokens
from hf_dart.training.data.packed_tokens import tokenize
from hf_dart.training.data.packing import Packer


def test_packing_keeps_short_documents_whole(tmp_path: Path) -> None:
    lengths = [5, 30, 9, 3, 12, 2, 20]
    stream = np.concatenate([[*(100 * i + j + 1 for j in range(n - 1)), 0] for i, n in enumerate(lengths)]).astype(
        np.uint16
    )
    path = tmp_path / "ids.bin"
    stream.tofile(path)
    rows = PackedTokens(path, length=16, eos=0, minimum=3, vocab_size=2**16)
    found: list[list[int]] = []
    for row in rows:
        assert row["input_ids"].shape == row["documents"].shape == (16,)
        for document in range(int(row["documents"].max()) + 1):
            found.append(row["input_ids"][row["documents"] == document].tolist())
        assert (row["input_ids"][row["documents"] < 0] == 0).all()
    pieces = []
    for start, n in zip(np.cumsum([0, *lengths[:-1]]).tolist(), lengths, strict=True):
        document = stream[start : start + n].tolist()
        pieces += [document[i : i + 16] for i in range(0, n, 16)]
    assert found == [piece for piece in pieces if len(piece) >= 3]

    alone = PackedTokens(path, length=16, eos=0, minimum=3, share_rows=False, vocab_size=2**16)
    assert [row["input_ids"][row["documents"] == 0].tolist() for row in alone] == found
    assert all(row["documents"].max() == 0 for row in alone)


def test_ids_of_a_large_vocabulary_are_read_as_wide_as_they_were_written(tmp_path: Path) -> None:
    path, eos = tmp_path / "ids.bin", 2**16

    class Large:
        eos_token_id = eos

        def __len__(self) -> int:
            return eos + 8000

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [int(word) for word in text.split()]}

    tokenize(["1 70000 3"], Large()).tofile(path)
    (row,) = PackedTokens(path, length=4, eos=eos, minimum=2, vocab_size=len(Large()))
    assert row["input_ids"].tolist() == [1, 70000, 3, eos]
    with pytest.raises(ValueError, match="does not say how wide its ids are; give vocab_size"):
        PackedTokens(path, length=4, eos=eos)
    np.arange(8, dtype=np.uint16).tofile(path)
    with pytest.raises(ValueError, match="holds the id 458758, and the vocabulary ends at 73535; give the vocab_size"):
        PackedTokens(path, length=4, eos=eos, vocab_size=len(Large()))


def test_every_piece_of_a_document_begins_as_the_document_does() -> None:
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
