"""`PackedTokens`: rows of fixed length from a stream of token ids, short documents whole, none seen by another."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


def id_type(vocab_size: int) -> type[np.uint16 | np.uint32]:
    """The type that token ids are written in: 16 bits where the vocabulary allows it."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def tokenize(texts: Iterable[str], tokenizer: Any) -> np.ndarray:
    """Token ids [n] of `texts`, the end-of-text token after each, in the type that `id_type` says."""
    dtype = id_type(len(tokenizer))
    parts = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        parts.append(np.array([*ids, tokenizer.eos_token_id], dtype=dtype))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


class PackedTokens(Dataset[dict[str, Tensor]]):
    """Rows of `length` tokens cut from a stream of documents.

    A document longer than a row is cut into rows; what is left of it, and every shorter document, goes whole
    into the next row with room. Rows are filled up with padding, never with half a document.

    Args:
        stream: token ids [n], or a file of them, which is memory-mapped, as `tokenize(...).tofile(file)` writes it;
            documents end with `eos`.
        length: T, tokens of a row.
        eos: the end-of-text token; it belongs to the document that it ends.
        minimum: shorter pieces are left out. A piece of m tokens has m - d anchors.
        share_rows: False gives every piece a row of its own, for targets that cannot keep documents apart.
        vocab_size: of the tokenizer, by which the width of a file's ids is known; an array has its own.

    Raises:
        ValueError: it is not known how wide the ids of a file are, or they lie beyond the vocabulary.
    """

    def __init__(
        self,
        stream: np.ndarray | str | Path,
        length: int,
        eos: int,
        minimum: int = 16,
        share_rows: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        if isinstance(stream, (str, Path)):
            if vocab_size is None:
                raise ValueError(f"{stream} does not say how wide its ids are; give vocab_size, len(tokenizer).")
            path, stream = stream, np.memmap(stream, dtype=id_type(vocab_size), mode="r")
            if stream.max() >= vocab_size:
                raise ValueError(
                    f"{path} holds the id {stream.max()}, and the vocabulary ends at {vocab_size - 1}; give the "
                    "vocab_size that it was written with."
                )
        self.stream = stream
        self.length = length
        ends = np.flatnonzero(stream == eos) + 1
        if not len(ends) or ends[-1] != len(stream):
            ends = np.append(ends, len(stream))
        self.rows: list[list[tuple[int, int]]] = []  # pieces (start, stop) of each row
        room = 0
        begin = 0
        for end in ends.tolist():
            for start in range(begin, end, length):
                size = min(length, end - start)
                if size < minimum:
                    continue
                if size > room or not share_rows:
                    self.rows.append([])
                    room = length
                self.rows[-1].append((start, start + size))
                room -= size
            begin = end

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input_ids` [T] (0 in padding) and `documents` [T] (0, 1, ... in a row; -1 in padding)."""
        ids = torch.zeros(self.length, dtype=torch.long)
        documents = torch.full((self.length,), -1, dtype=torch.long)
        at = 0
        for number, (start, stop) in enumerate(self.rows[index]):
            size = stop - start
            ids[at : at + size] = torch.from_numpy(self.stream[start:stop].astype(np.int64))
            documents[at : at + size] = number
            at += size
        return {"input_ids": ids, "documents": documents}
