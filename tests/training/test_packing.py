"""Rows to train on: packing."""

from __future__ import annotations

import numpy as np

from hf_dart.training import PackedTokens
from hf_dart.training.data.packing import Packer


def test_packing_keeps_short_documents_whole() -> None:
    lengths = [5, 30, 9, 3, 12, 2, 20]
    stream = np.concatenate([[*(100 * i + j + 1 for j in range(n - 1)), 0] for i, n in enumerate(lengths)]).astype(
        np.uint16
    )
    rows = PackedTokens(stream, length=16, eos=0, minimum=3)
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
    expected = [piece for piece in pieces if len(piece) >= 3]
    assert sorted(found) == sorted(expected)
    assert len(rows) < len(expected)

    alone = PackedTokens(stream, length=16, eos=0, minimum=3, share_rows=False)
    assert [row["input_ids"][row["documents"] == 0].tolist() for row in alone] == expected
    assert all(row["documents"].max() == 0 for row in alone)


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
