"""Documents to rows of one length: short ones whole, several in a row, none of which attends to another."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

Document = tuple[np.ndarray, np.ndarray]
"""Token ids [n] int32 and bool [n], which of them a head may be trained to draft."""


@dataclass(frozen=True)
class Packer:
    """Packer of documents into rows.

    A document longer than a row is cut; pieces that no draft can be trained in are left out. Where a document begins
    with the tokenizer's first token, so does each of its pieces: targets write badly without it.
    """

    length: int  # T, tokens of a row
    draft_length: int  # d; a piece needs d + 1 tokens, for at least one anchor
    share_rows: bool = True  # False gives every piece a row of its own
    bos: int | None = None  # that first token

    def __call__(self, documents: Iterable[Document]) -> dict[str, list[np.ndarray]]:
        """Rows as columns: `input_ids`, `documents` (0, 1, ... in a row; -1 in padding) and `loss_mask`, of [T]."""
        pieces = [piece for document in documents for piece in self._cut(*document)]
        if self.share_rows:
            rows = best_fit([len(ids) for ids, _ in pieces], self.length)
            np.random.default_rng(len(rows)).shuffle(rows)  # else long documents come first
        else:
            rows = [[number] for number in range(len(pieces))]
        columns: dict[str, list[np.ndarray]] = {"input_ids": [], "documents": [], "loss_mask": []}
        for row in rows:
            ids, mask = (np.concatenate(parts) for parts in zip(*(pieces[piece] for piece in row), strict=True))
            numbers = np.repeat(np.arange(len(row), dtype=np.int32), [len(pieces[piece][0]) for piece in row])
            for column, values, blank in zip(columns.values(), (ids, numbers, mask), (0, -1, False), strict=True):
                column.append(np.pad(values, (0, self.length - len(values)), constant_values=blank))
        return columns

    def _cut(self, ids: np.ndarray, mask: np.ndarray) -> Iterable[Document]:
        for piece, learned in cut(ids, mask, self.length, self.bos):
            # The anchors of the piece, and whether the first token that each drafts may be (`blocks.draw_anchors`).
            possible = np.append(learned[2:], False)[: max(len(piece) - self.draft_length, 0)]
            if possible.any():
                yield piece, learned


def cut(ids: np.ndarray, mask: np.ndarray, length: int, bos: int | None) -> Iterator[Document]:
    """Yield a document in pieces of `length` tokens or less.

    If it begins with `bos`, so does every piece, which does not count there as what a head may draft.
    """
    yield ids[:length], mask[:length]
    front = ids[:1] if bos is not None and ids[:1].tolist() == [bos] else ids[:0]
    step = length - len(front)
    for start in range(length, len(ids), step):
        piece = slice(start, start + step)
        yield np.concatenate([front, ids[piece]]), np.concatenate([np.zeros(len(front), bool), mask[piece]])


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return indices of `sizes` by bins of `capacity`: the largest first, each into the fullest bin that takes it."""
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # (room, bin), ascending
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        place = bisect_left(open_bins, (sizes[index], 0))
        if place < len(open_bins):
            room, number = open_bins.pop(place)
        else:
            room, number = capacity, len(bins)
            bins.append([])
        bins[number].append(index)
        insort(open_bins, (room - sizes[index], number))
    return bins


def tokenize(texts: Iterable[str], tokenizer: Any) -> np.ndarray:
    """Token ids [n] int32 of `texts`, the end-of-text token after each."""
    eos = tokenizer.eos_token_id
    encoded = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    return np.array([token for ids in encoded for token in (*ids, eos)], np.int32)


def split_documents(stream: np.ndarray, eos: int | None) -> Iterator[np.ndarray]:
    """Yield the documents of a stream of token ids [n], as int32, the token that ends each included."""
    begin = 0
    for end in [*(np.flatnonzero(stream == eos) + 1).tolist(), len(stream)]:
        if end > begin:
            yield stream[begin:end].astype(np.int32)
        begin = end


class PackedTokens(Dataset[dict[str, Tensor]]):
    """Rows of `length` tokens from a stream of documents, packed by a [`Packer`] and held in memory.

    Args:
        stream: token ids [n], such as `tokenize` gives; documents end with `eos`.
        length: T, tokens of a row.
        eos: the end-of-text token; it belongs to the document that it ends.
        minimum: shorter pieces are left out. A piece of m tokens has m - d anchors.
        share_rows: False gives every piece a row of its own, for targets that cannot keep documents apart.
    """

    def __init__(self, stream: np.ndarray, length: int, eos: int, minimum: int = 16, share_rows: bool = True) -> None:
        pack = Packer(length, minimum - 1, share_rows)
        self._columns = pack((ids, np.ones(len(ids), bool)) for ids in split_documents(stream, eos))

    def __len__(self) -> int:
        return len(self._columns["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input_ids` [T] (0 in padding) and `documents` [T] (0, 1, ... in a row; -1 in padding)."""
        return {name: torch.from_numpy(self._columns[name][index]).long() for name in ("input_ids", "documents")}
