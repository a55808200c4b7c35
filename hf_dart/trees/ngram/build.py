"""Counting n-grams: chunks of a corpus become small tables, and small tables are merged into larger ones.

Memory is bounded by the size of a chunk, whatever the size of the corpus; what is counted waits on disk. One chunk
needs one process, so chunks are counted by several; tables counted on many machines are merged just the same.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from hf_dart.trees.arrays import Array
from hf_dart.trees.ngram.table import MOST_COUNTED, NgramSpec, NgramTable, write_metadata
from hf_dart.trees.vocabulary import hash_of_ids

CHUNK = 2**23
"""Tokens that one process counts at a time; it needs about 50 bytes for each."""
_MERGED_AT_ONCE = 2**22  # n-grams
_FAN_IN = 32  # tables that are merged into one while counting goes on
_LETTERS = 4  # of a token, about

Progress = Callable[[str], object]


@dataclass(frozen=True)
class _Chunk:
    """Tokens to count.

    Attributes:
        tokens: [T], one document after the other.
        ends: where each document ends; the last may go on beyond T.
        starts: n-grams that begin in the first so many places are counted here, others in the next chunk.
        texts: instead of all these, documents that have yet to be tokenized.
    """

    tokens: Array
    ends: Array
    starts: int
    texts: tuple[str, ...] = ()


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
    workers: int = 1,
    chunk: int = CHUNK,
    progress: Progress = lambda line: None,
) -> NgramTable:
    """Count the n-grams of a corpus into a new file.

    Args:
        documents: texts, sequences of token ids, or rows with either in `column`, as a `datasets` set (streaming or
            not) gives them. No n-gram reaches from one document into the next.
        path: of the file to write.
        order: n, the length of the longest n-grams.
        vocab_size: V; as many as `tokenizer` has where left out.
        tokenizer: of the target: for texts, and so that its hash is kept. Give it for token ids as well.
        eos: token put after every text. For one long array of ids [T], the token that ends each document in it.
        min_counts: see `merge`.
        workers: processes that count. With more than one, call this under `if __name__ == "__main__":`.
        chunk: tokens that a process counts at a time.
        progress: called with one line now and then.

    Raises:
        ValueError: a token lies beyond the vocabulary, the order is too high, or there is nothing to count.
    """
    if vocab_size is None and tokenizer is None:
        raise ValueError("The size of the vocabulary is not known; give tokenizer= or vocab_size=.")
    hashed = None if tokenizer is None else hash_of_ids(tokenizer.get_vocab())
    spec = NgramSpec(order, vocab_size or len(tokenizer), hashed)
    _check_min_counts(spec, min_counts)
    if isinstance(documents, np.ndarray) and documents.ndim == 1:
        chunks = _chunks_of_array(documents, eos, chunk, order)
    else:
        chunks = _chunks_of_documents(documents, column, chunk, order, tokenizer)
    path = Path(path)
    with TemporaryDirectory(dir=folder_of(path), prefix=".ngram-") as folder:
        stack, tokens = TableStack(Path(folder), progress), 0
        for table, counted in _counted(chunks, spec, eos, tokenizer, workers, Path(folder)):
            stack.push(table)
            tokens += counted
            progress(f"{tokens} tokens counted")
        if not any(len(NgramTable.load(table, check=False).keys[0]) for table in stack.tables):
            raise ValueError("There is nothing to count: no document has two tokens; give some text.")
        return merge(stack.tables, path, min_counts=min_counts, progress=progress)


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
    sources = [NgramTable.load(table, check=False) for table in tables]
    spec = sources[0].spec
    for source in sources:
        if source.spec != spec:
            raise ValueError(
                f"{source.path} and {sources[0].path} were not counted alike ({source.spec}, {spec}); merge tables "
                "of one order and one tokenizer."
            )
    asked = _check_min_counts(spec, min_counts)
    least = np.min([source.min_counts for source in sources], axis=0)  # what one has pruned another may have kept
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
    return NgramTable.load(path, check=False)


# ---- chunks -----------------------------------------------------------------------------------------


def _chunks_of_array(tokens: Array, eos: int | None, size: int, order: int) -> Iterator[_Chunk]:
    """Chunks of one long array, which may be memory-mapped; documents end after `eos`."""
    for start in range(0, len(tokens), size):
        part = np.array(tokens[start : start + size + order - 1])
        ends = np.flatnonzero(part == eos) + 1 if eos is not None else np.zeros(0, dtype=np.int64)
        whole = start + len(part) == len(tokens)
        yield _Chunk(part, np.append(ends, len(part) if whole else len(part) + order), min(size, len(tokens) - start))


def _chunks_of_documents(
    documents: Iterable[Any], column: str, size: int, order: int, tokenizer: Any
) -> Iterator[_Chunk]:
    """Chunks of about `size` tokens of texts or of sequences of ids."""
    texts: list[str] = []
    rows: list[Array] = []
    filled = 0
    for document in documents:
        row = document[column] if isinstance(document, Mapping) else document
        if isinstance(row, str):
            if tokenizer is None:
                raise ValueError("The documents are texts; give tokenizer= to count their tokens.")
            texts.append(row)
            filled += max(len(row) // _LETTERS, 1)
        else:
            ids = np.asarray(row)
            if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
                raise ValueError(f"A document is neither a text nor a sequence of token ids: {str(row)[:60]!r}.")
            if len(ids) > size:
                yield from _chunks_of_array(ids, None, size, order)
                continue
            rows.append(ids)
            filled += len(ids)
        if filled >= size:
            yield _gathered(texts, rows)
            texts, rows, filled = [], [], 0
    if filled:
        yield _gathered(texts, rows)


def _gathered(texts: list[str], rows: list[Array]) -> _Chunk:
    tokens = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
    return _Chunk(tokens, np.cumsum([len(row) for row in rows], dtype=np.int64), len(tokens), tuple(texts))


# ---- counting ---------------------------------------------------------------------------------------


def _counted(
    chunks: Iterator[_Chunk],
    spec: NgramSpec,
    eos: int | None,
    tokenizer: Any,
    workers: int,
    folder: Path,
) -> Iterator[tuple[Path, int]]:
    """A table per chunk, and how many tokens it counts; in any order."""
    # Not forked: a fork of a process with threads (torch's, the tokenizer's) may hang.
    pool: AbstractContextManager[Executor | None] = nullcontext()
    if workers > 1:
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    with pool as executor:
        running: set[Future[tuple[Path, int]]] = set()
        for number, chunk in enumerate(chunks):
            task = (chunk, spec, eos, tokenizer if chunk.texts else None, folder / f"chunk-{number}")
            if executor is None:
                yield count_chunk(*task)
                continue
            running.add(executor.submit(count_chunk, *task))
            if len(running) > workers:  # one waits, so that none idles
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        yield from (future.result() for future in running)


def count_chunk(chunk: _Chunk, spec: NgramSpec, eos: int | None, tokenizer: Any, path: Path) -> tuple[Path, int]:
    """Write the table of one chunk; returns its path and how many tokens were counted."""
    if chunk.texts:
        ids = tokenizer(list(chunk.texts), add_special_tokens=False, verbose=False)["input_ids"]
        after = [] if eos is None else [eos]
        texts = _gathered([], [np.array(row + after, dtype=np.int64) for row in ids])
        tokens = np.concatenate([chunk.tokens, texts.tokens])
        chunk = _Chunk(tokens, np.append(chunk.ends, len(chunk.tokens) + texts.ends), len(tokens))
    tokens, starts, bits = chunk.tokens.astype(np.int64), chunk.starts, spec.bits
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < spec.vocab_size:
        raise ValueError(
            f"The corpus has token {tokens.min() if tokens.min() < 0 else tokens.max()}, and the vocabulary ends at "
            f"{spec.vocab_size - 1}; give the tokenizer that made these ids."
        )
    begins = np.arange(starts)
    room = chunk.ends[np.searchsorted(chunk.ends, begins, side="right")] - begins  # tokens until the document ends
    with TemporaryDirectory(dir=path.parent) as folder:
        writer = TableWriter(Path(folder), spec)
        counted: tuple[Array, Array] = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        for order in range(spec.order, 0, -1):
            # What is longer begins with these too; what ends with its document is counted here.
            places = begins[room >= order] if order == spec.order else begins[room == order]
            keys = tokens[places]
            for place in range(1, order):
                keys <<= bits
                keys |= tokens[places + place]
            keys.sort()
            counted = _unique(*_interleaved([(counted[0] >> bits, counted[1]), _unique(keys)]))
            if order > 1:
                writer.append(order, *counted)
        writer.unigrams[counted[0]] = counted[1]
        writer.finish(path, int(counted[1].sum()), (1,) * (spec.order - 1))
    return path, int(counted[1].sum())


def _unique(keys: Array, counts: Array | None = None) -> tuple[Array, Array]:
    """Sorted keys without repetitions and the sum of the counts (of 1 each where left out) of equal ones."""
    if not len(keys):
        return keys, np.zeros(0, dtype=np.int64)
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    if counts is None:
        return keys[first], np.diff(first, append=len(keys))
    return keys[first], np.add.reduceat(counts, first, dtype=np.int64)


def _interleaved(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The sorted keys of all parts in order, and their counts."""
    keys = np.concatenate([keys for keys, _ in parts])
    counts = np.concatenate([counts for _, counts in parts])
    order = keys.argsort(kind="stable")  # finds the sorted runs that are there
    return keys[order], counts[order]


# ---- merging ----------------------------------------------------------------------------------------


class TableStack:
    """Tables that wait to be merged, and are in part already, so that they stay few.

    Attributes:
        tables: their files.
    """

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder, self._progress = folder, progress
        self._levels: list[list[Path]] = []
        self._merged = 0

    @property
    def tables(self) -> list[Path]:
        return [table for level in self._levels for table in level]

    def push(self, table: Path, level: int = 0) -> None:
        """Add a table; `_FAN_IN` of a level become one of the next."""
        if len(self._levels) == level:
            self._levels.append([])
        self._levels[level].append(table)
        if len(self._levels[level]) < _FAN_IN:
            return
        full, self._levels[level] = self._levels[level], []
        path = self._folder / f"merged-{self._merged}"
        self._merged += 1
        merge(full, path, progress=self._progress)
        for part in full:
            part.unlink()
        self.push(path, level + 1)


def _added_up(parts: Sequence[tuple[Array, Array]]) -> Iterator[tuple[Array, Array]]:
    """Sorted unique keys and the summed counts of all parts, some `_MERGED_AT_ONCE` of them at a time."""
    step = max(_MERGED_AT_ONCE // (4 * len(parts)), 1)
    pivots = np.sort(np.concatenate([keys[step::step] for keys, _ in parts]))
    bounds = pivots[_MERGED_AT_ONCE // step :: _MERGED_AT_ONCE // step]
    ranges = [np.concatenate([[0], keys.searchsorted(bounds), [len(keys)]]) for keys, _ in parts]
    for place in range(len(bounds) + 1):
        pieces = [
            (keys[own[place] : own[place + 1]], counts[own[place] : own[place + 1]])
            for (keys, counts), own in zip(parts, ranges, strict=True)
        ]
        yield _unique(*_interleaved(pieces))


class TableWriter:
    """Writes a table piece by piece: safetensors' own writers take whole tensors in memory.

    Attributes:
        unigrams: [V] int64, to be filled in.
        lengths: n-grams so far, per order from 2 on.
    """

    def __init__(self, folder: Path, spec: NgramSpec) -> None:
        self.unigrams = np.zeros(spec.vocab_size, dtype=np.int64)
        self.lengths = [0] * (spec.order - 1)
        self._folder, self._spec = folder, spec
        for name in self._names():
            (folder / name).touch()

    def _names(self) -> list[str]:
        """Files of int64 first, so that all arrays are aligned."""
        orders = range(2, self._spec.order + 1)
        return [f"{what}.{order}" for what in ("keys", "counts") for order in orders]

    def append(self, order: int, keys: Array, counts: Array) -> None:
        """Add n-grams [n] after those that are there."""
        self.lengths[order - 2] += len(keys)
        for what, array in (
            ("keys", keys.astype("<i8", copy=False)),
            ("counts", np.minimum(counts, MOST_COUNTED).astype("<u4")),
        ):
            with open(self._folder / f"{what}.{order}", "ab") as file:
                file.write(array.data)  # unlike array.tofile, it says that a disk is full

    def finish(self, path: Path, tokens: int, min_counts: tuple[int, ...]) -> None:
        """Put the pieces together; the file appears at once and whole."""
        (self._folder / "counts.1").write_bytes(self.unigrams.astype("<i8").data)
        header: dict[str, Any] = {"__metadata__": write_metadata(self._spec, tokens, min_counts)}
        end = 0
        names = ["counts.1", *self._names()]
        for name in names:
            what, order = name.split(".")
            length = len(self.unigrams) if order == "1" else self.lengths[int(order) - 2]
            wide = order == "1" or what == "keys"
            begin, end = end, end + length * (8 if wide else 4)
            header[name] = {"dtype": "I64" if wide else "U32", "shape": [length], "data_offsets": [begin, end]}
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        whole = self._folder / "whole"
        with open(whole, "wb") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            for name in names:
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
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder} to write the table to.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the file to write the table to.")
    return folder
