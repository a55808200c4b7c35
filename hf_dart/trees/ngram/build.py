"""Counting n-grams: chunks of a corpus become small tables on disk, which are merged into one.

Memory is bounded by the size of a chunk, whatever the size of the corpus. Tables that were counted on several machines
are merged just the same.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from hf_dart.trees.ngram.table import MOST_COUNTED, Array, NgramSpec, NgramTable, write_metadata
from hf_dart.trees.vocabulary import hash_of_ids

CHUNK = 2**23  # tokens that are counted at a time, which takes about 50 bytes for each
_MERGED_AT_ONCE = 2**22  # n-grams

Progress = Callable[[str], object]


def build(
    documents: Iterable[Any],
    path: str | Path,
    *,
    order: int = 3,
    vocab_size: int | None = None,
    tokenizer: Any = None,
    column: str = "text",
    eos: int | None = None,
    min_counts: Sequence[int] = (),
    chunk: int = CHUNK,
    progress: Progress = lambda line: None,
) -> NgramTable:
    """Count the n-grams of a corpus into a new file.

    Args:
        documents: texts, sequences of token ids, or rows with either in `column`, as a `datasets` set (streaming or
            not) gives them. No n-gram reaches from one document into the next.
        path: of the file to write.
        order: n, the length of the longest n-grams.
        vocab_size: V, rows of the target's embedding table; as many as `tokenizer` has where left out.
        tokenizer: of the target: for texts, and so that its hash is kept. Give it for token ids as well.
        eos: token put after every text. For one long array of ids [T], the token that ends each document in it.
        min_counts: see `merge`.
        chunk: tokens that are counted at a time.
        progress: called with one line now and then.

    Raises:
        ValueError: a token lies beyond the vocabulary, the order is too high, or there is nothing to count.
    """
    if vocab_size is None and tokenizer is None:
        raise ValueError("The size of the vocabulary is not known; give tokenizer= or vocab_size=.")
    hashed = None if tokenizer is None else hash_of_ids(tokenizer.get_vocab(), vocab_size)
    spec = NgramSpec(order, vocab_size or len(tokenizer), hashed)
    _check_min_counts(spec, min_counts)
    if isinstance(documents, np.ndarray) and documents.ndim == 1:
        chunks = _chunks([documents], eos, chunk, order)
    else:
        chunks = _chunks(_ids(documents, column, tokenizer, eos), None, chunk, order)
    path, total = Path(path), 0
    tables: list[Path] = []
    with TemporaryDirectory(dir=folder_of(path), prefix=".ngram-") as folder:
        for tokens, room in chunks:
            tables.append(Path(folder) / f"chunk-{len(tables)}")
            total += _count(tokens, room, spec, tables[-1])
            progress(f"{total} tokens counted")
        if not any(len(NgramTable.load(table).keys[0]) for table in tables):
            raise ValueError("There is nothing to count: no document has two tokens; give some text.")
        return merge(tables, path, min_counts=min_counts, progress=progress)


def merge(
    tables: Sequence[str | Path],
    path: str | Path,
    *,
    min_counts: Sequence[int] = (),
    progress: Progress = lambda line: None,
) -> NgramTable:
    """Add up tables of one tokenizer and order into a new file; also prunes a single one.

    Args:
        tables: files. Those that were pruned themselves add what they kept.
        path: of the file to write.
        min_counts: n-grams that occur less often are left out: per order from 2 on, none smaller than the one
            before; the last holds for all higher orders. All are kept where left out.
        progress: called with one line now and then.

    Raises:
        ValueError: they do not belong together, or one cannot be read.
    """
    sources = [NgramTable.load(table) for table in tables]
    spec = sources[0].spec
    for source in sources:
        if source.spec != spec:
            raise ValueError(
                f"{source.path} and {sources[0].path} were not counted alike ({source.spec}, {spec}); merge tables "
                "of one order and one tokenizer."
            )
    asked = _check_min_counts(spec, min_counts)
    least = np.min([source.min_counts for source in sources], axis=0)  # one may have pruned what another kept
    kept = tuple(np.maximum(asked, least).tolist())
    path = Path(path)
    with TemporaryDirectory(dir=folder_of(path), prefix=".ngram-") as folder:
        writer = TableWriter(Path(folder), spec)
        writer.unigrams += sum(source.unigrams for source in sources)
        for order in range(2, spec.order + 1):
            parts = [(source.keys[order - 2], source.counts[order - 2]) for source in sources]
            for keys, counts in _added_up(parts):
                often = counts >= asked[order - 2]
                writer.append(order, keys[often], counts[often])
            progress(f"{writer.lengths[order - 2]} n-grams of order {order} from {len(sources)} tables")
        writer.finish(path, sum(source.tokens for source in sources), kept)
    return NgramTable.load(path)


def _ids(documents: Iterable[Any], column: str, tokenizer: Any, eos: int | None) -> Iterator[Array]:
    """Token ids [T] of each document."""
    for document in documents:
        row = document[column] if isinstance(document, Mapping) else document
        if isinstance(row, str):
            if tokenizer is None:
                raise ValueError("The documents are texts; give tokenizer= to count their tokens.")
            row = tokenizer(row, add_special_tokens=False, verbose=False)["input_ids"] + ([] if eos is None else [eos])
        ids = np.asarray(row)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise ValueError(f"A document is neither a text nor a sequence of token ids: {str(row)[:60]!r}.")
        yield ids


def _chunks(rows: Iterable[Array], end: int | None, size: int, order: int) -> Iterator[tuple[Array, Array]]:
    """Tokens [T] of rows, at least `size` at a time but for the last, and `room` [T].

    `room` says how long an n-gram may be that begins at a place: up to the end of its document, at most `order`; 0 for
    tokens that follow in the next chunk again. `end` is the token that ends a document within a row, if one does.
    """
    parts: list[tuple[Array, Array]] = []
    filled = 0
    for row in rows:
        for start in range(0, len(row), size):
            tokens = np.array(row[start : start + size + order - 1], dtype=np.int64)
            places = np.arange(len(tokens))
            ends = np.append(np.flatnonzero(tokens == end) + 1 if end is not None else places[:0], len(tokens))
            room = np.minimum(ends[ends.searchsorted(places, side="right")] - places, order)
            room[size:] = 0
            parts.append((tokens, room))
            filled += len(tokens)
            if filled >= size:
                yield np.concatenate([part for part, _ in parts]), np.concatenate([part for _, part in parts])
                parts, filled = [], 0
    if parts:
        yield np.concatenate([part for part, _ in parts]), np.concatenate([part for _, part in parts])


def _count(tokens: Array, room: Array, spec: NgramSpec, path: Path) -> int:
    """Write the table of one chunk (`_chunks`) and return the number of its tokens."""
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < spec.vocab_size:
        raise ValueError(
            f"The corpus has token {tokens.min() if tokens.min() < 0 else tokens.max()}, and the vocabulary ends at "
            f"{spec.vocab_size - 1}; give the tokenizer that made these ids."
        )
    with TemporaryDirectory(dir=path.parent) as folder:
        writer = TableWriter(Path(folder), spec)
        counted: tuple[Array, Array] = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        for order in range(spec.order, 0, -1):
            # Each n-gram of the order above begins with one of this order; those at the end of a document come on top.
            places = np.flatnonzero(room == order)
            keys = tokens[places]
            for place in range(1, order):
                keys = (keys << spec.bits) | tokens[places + place]
            keys.sort()
            counted = _summed([(counted[0] >> spec.bits, counted[1]), (keys, np.ones(len(keys), dtype=np.int64))])
            if order > 1:
                writer.append(order, *counted)
        writer.unigrams[counted[0]] = counted[1]
        total = int(counted[1].sum())
        writer.finish(path, total, (1,) * (spec.order - 1))
    return total


def _summed(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Keys of all parts, each of them sorted, without repetitions, and the sums of the counts of equal ones."""
    keys = np.concatenate([keys for keys, _ in parts])
    counts = np.concatenate([counts for _, counts in parts])
    if not len(keys):
        return keys, counts.astype(np.int64)
    order = keys.argsort(kind="stable")  # a stable sort uses existing sorted runs
    keys, counts = keys[order], counts[order]
    first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    return keys[first], np.add.reduceat(counts, first, dtype=np.int64)


def _added_up(parts: Sequence[tuple[Array, Array]]) -> Iterator[tuple[Array, Array]]:
    """Sorted unique keys and the summed counts of all parts, some `_MERGED_AT_ONCE` of them at a time."""
    step = max(_MERGED_AT_ONCE // (4 * len(parts)), 1)
    pivots = np.sort(np.concatenate([keys[step::step] for keys, _ in parts]))
    bounds = pivots[_MERGED_AT_ONCE // step :: _MERGED_AT_ONCE // step]
    ranges = [np.concatenate([[0], keys.searchsorted(bounds), [len(keys)]]) for keys, _ in parts]
    for place in range(len(bounds) + 1):
        pieces = []
        for (keys, counts), own in zip(parts, ranges, strict=True):
            here = slice(own[place], own[place + 1])
            pieces.append((keys[here], counts[here]))
        yield _summed(pieces)


class TableWriter:
    """Writer of a table, piece by piece: safetensors' own writers take whole tensors in memory."""

    def __init__(self, folder: Path, spec: NgramSpec) -> None:
        self.unigrams = np.zeros(spec.vocab_size, dtype=np.int64)  # to be filled in
        self.lengths = [0] * (spec.order - 1)  # n-grams so far, per order from 2 on
        self._folder, self._spec = folder, spec

    def append(self, order: int, keys: Array, counts: Array) -> None:
        """Add n-grams [n] after those that are there."""
        self.lengths[order - 2] += len(keys)
        self._append(f"keys.{order}", keys.astype("<i8", copy=False))
        self._append(f"counts.{order}", np.minimum(counts, MOST_COUNTED).astype("<u4"))

    def _append(self, name: str, array: Array) -> None:
        with open(self._folder / name, "ab") as file:
            file.write(array.data)  # unlike array.tofile, it says that a disk is full

    def finish(self, path: Path, tokens: int, min_counts: tuple[int, ...]) -> None:
        """Put the pieces together; the file appears at once and whole."""
        self._append("counts.1", self.unigrams.astype("<i8"))
        header: dict[str, Any] = {"__metadata__": write_metadata(self._spec, tokens, min_counts)}
        # Those of int64 first, so that all arrays are aligned.
        shapes = {"counts.1": ("I64", len(self.unigrams))}
        for what, dtype in (("keys", "I64"), ("counts", "U32")):
            shapes |= {f"{what}.{order}": (dtype, length) for order, length in enumerate(self.lengths, start=2)}
        end = 0
        for name, (dtype, length) in shapes.items():
            begin, end = end, end + length * (8 if dtype == "I64" else 4)
            header[name] = {"dtype": dtype, "shape": [length], "data_offsets": [begin, end]}
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        whole = self._folder / "whole"
        with open(whole, "wb") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            for name, (_, length) in shapes.items():
                if length:
                    with open(self._folder / name, "rb") as part:
                        shutil.copyfileobj(part, file, 2**20)
                    (self._folder / name).unlink()
        whole.replace(path)


def _check_min_counts(spec: NgramSpec, min_counts: Sequence[int]) -> tuple[int, ...]:
    """One per order from 2 on."""
    asked = list(min_counts) or [1]
    asked += asked[-1:] * (spec.order - 1 - len(asked))
    if len(asked) > spec.order - 1 or asked[0] < 1 or sorted(asked) != asked or asked[-1] > MOST_COUNTED:
        raise ValueError(
            f"min_counts {tuple(min_counts)} do not suit order {spec.order}: give up to {spec.order - 1} numbers from "
            "1 on, none smaller than the one before (an n-gram is scored by the count of its beginning)."
        )
    return tuple(asked)


def folder_of(path: Path) -> Path:
    """Return the folder that a table is to be written to, or raise."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder} to write the table to.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the file to write the table to.")
    return folder
