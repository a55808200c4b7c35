"""Rows to train on: packing."""

from __future__ import annotations

import numpy as np

from hf_dart.training import PackedTokens
from hf_dart.training.data.packing import Packer


def test_packed_tokens_are_the_rows_of_the_packer() -> None:
    lengths = [5, 30, 9, 3, 12, 2, 20]
    documents = [np.array([*range(100 * i + 1, 100 * i + n), 0], np.int32) for i, n in enumerate(lengths)]
    for share_rows in (True, False):
        rows = PackedTokens(np.concatenate(documents).astype(np.uint16), 16, 0, minimum=3, share_rows=share_rows)
        packed = Packer(16, 2, share_rows)((ids, np.ones(len(ids), bool)) for ids in documents)
        assert [row["input_ids"].tolist() for row in rows] == [ids.tolist() for ids in packed["input_ids"]]
        assert [row["documents"].tolist() for row in rows] == [of.tolist() for of in packed["documents"]]


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
