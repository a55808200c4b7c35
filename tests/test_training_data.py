"""Rows to train on: packing and mixing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hf_dart.training import Mixture, PackedTokens


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


def test_mixture_keeps_its_shares_and_repeats_what_is_short() -> None:
    mixture = Mixture([list(range(3)), list(range(100, 200))], (0.25, 0.75), rows=40)  # type: ignore[list-item]
    drawn = [mixture[i] for i in range(len(mixture))]
    assert len(drawn) == 40
    short, long = [x for x in drawn if x < 100], [x for x in drawn if x >= 100]
    assert len(short) == 10
    assert all(short.count(x) in (3, 4) for x in range(3))
    assert len(set(long)) == len(long) == 30
