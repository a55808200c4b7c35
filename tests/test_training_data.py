"""Rows to train on: packing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hf_dart.training import PackedTokens


def test_packing_keeps_short_documents_whole(tmp_path: Path) -> None:
    lengths = [5, 30, 9, 3, 12, 2, 20]
    stream = np.concatenate([[*(100 * i + j + 1 for j in range(n - 1)), 0] for i, n in enumerate(lengths)]).astype(
        np.uint16
    )
    path = tmp_path / "ids.bin"
    stream.tofile(path)
    rows = PackedTokens(path, length=16, eos=0, minimum=3)
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

    alone = PackedTokens(path, length=16, eos=0, minimum=3, share_rows=False)
    assert [row["input_ids"][row["documents"] == 0].tolist() for row in alone] == found
    assert all(row["documents"].max() == 0 for row in alone)
