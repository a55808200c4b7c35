"""Reader of `.trie` files, in which DART's own code (arXiv 2601.19278) keeps its n-grams, into an `NgramTable`.

Little-endian and packed: `u64 order, u64 nodes`, then every node, `i32 token, u64 parent, i32 count, u64 children` and
its children, `i32 token, u64 node` each. Node 0 is the root; a parent stands in front of its children. A node stands
for the n-gram on the way to it, and its count is how often that occurs; the root's is not looked at, nor are children.

Memory is bounded whatever the size of a file: it is mapped, and what is known of its nodes lies on disk, 9 bytes each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from hf_dart.models.tokenizers import vocabulary_hash
from hf_dart.trees.ngram.build import Progress, TableWriter, folder_of, merge
from hf_dart.trees.ngram.table import Array, NgramSpec, NgramTable

_CHUNK = 2**20  # nodes that are taken in at a time; each needs about 150 bytes of memory
_HEADER = np.dtype([("order", "<u8"), ("nodes", "<u8")])
_NODE = np.dtype([("token", "<i4"), ("parent", "<u8"), ("count", "<i4"), ("children", "<u8")])
_CHILD = np.dtype([("token", "<i4"), ("node", "<u8")])


def read_trie(
    trie: str | Path,
    path: str | Path,  # of the table to write
    *,
    tokenizer: Any = None,  # that the n-grams were counted with, whose hash and size are kept in the table
    vocab_size: int | None = None,  # V, where there is no tokenizer to ask
    progress: Progress = lambda line: None,
) -> NgramTable:
    """Write the n-grams of a `.trie` file into a new table.

    N-grams with a count of 0, as reducing a trie leaves them, are left out; so is the root's count.
    """
    trie, path = Path(trie), Path(path)
    if vocab_size is None and tokenizer is None:
        raise ValueError("The size of the vocabulary is not known; give tokenizer= or vocab_size=.")
    if not trie.is_file():
        raise ValueError(f"There is no file {trie}; give a .trie file of DART's n-grams.")
    order, nodes = _read_header(trie)
    hashed = None if tokenizer is None else vocabulary_hash(tokenizer, vocab_size)
    spec = NgramSpec(order, vocab_size or len(tokenizer), hashed)
    with TemporaryDirectory(dir=folder_of(path), prefix=".trie-") as folder:
        known, parts, done = _Known(Path(folder), nodes, spec, trie), list[Path](), 0
        for heads in _chunks(trie, nodes):
            writer = TableWriter(Path(folder), spec)
            known.take(done, heads, writer)
            parts.append(Path(folder) / f"part-{done}")
            writer.finish(parts[-1], int(writer.unigrams.sum()), (1,) * (order - 1))
            done += len(heads)
            progress(f"{done} of {nodes} nodes read")
        return merge(parts, path, progress=progress)


def _damaged(trie: Path, what: str) -> ValueError:
    return ValueError(f"{trie} is no whole .trie file: {what}; fetch it again.")


def _read_header(trie: Path) -> tuple[int, int]:
    """Order and number of nodes; the latter is as the size of the file says."""
    size = trie.stat().st_size
    if size < _HEADER.itemsize:
        raise _damaged(trie, f"it has {size} bytes")
    order, nodes = (int(number) for number in np.fromfile(trie, dtype=_HEADER, count=1)[0])
    fits = _HEADER.itemsize + nodes * _NODE.itemsize + (nodes - 1) * _CHILD.itemsize
    if nodes < 1 or size != fits:
        raise _damaged(trie, f"{nodes} nodes take {fits} bytes and it has {size}")
    return order, nodes


def _chunks(trie: Path, nodes: int) -> Iterator[Array]:
    """Yield the heads of the nodes, without the lists of their children, `_CHUNK` of them at a time."""
    content = np.memmap(trie, dtype=np.uint8, mode="r")
    mapped, place = content.data, _HEADER.itemsize
    for first in range(0, nodes, _CHUNK):
        begins = []
        for number in range(first, min(first + _CHUNK, nodes)):
            begins.append(place)
            place += _NODE.itemsize
            children = int.from_bytes(mapped[place - _NODE["children"].itemsize : place], "little")
            place += children * _CHILD.itemsize
            if place > len(content):
                raise _damaged(trie, f"it ends inside node {number}, which has {children} children")
        yield content[np.array(begins)[:, None] + np.arange(_NODE.itemsize)].view(_NODE)[:, 0]
    if place < len(content):
        raise _damaged(trie, "bytes are left over after its last node")


class _Known:
    """N-grams of the nodes so far, as keys, and their depths, in files."""

    def __init__(self, folder: Path, nodes: int, spec: NgramSpec, trie: Path) -> None:
        self._spec, self._trie = spec, trie
        self._keys = np.memmap(folder / "nodes.keys", dtype="i8", mode="w+", shape=(nodes,))
        # One more than the length of the n-gram: 0 is a node that is not known yet.
        self._depths = np.memmap(folder / "nodes.depths", dtype="u1", mode="w+", shape=(nodes,))
        self._depths[0] = 1

    def take(self, first: int, heads: Array, writer: TableWriter) -> None:
        """Check the nodes from number `first` on and write their n-grams."""
        ids, tokens = np.arange(first, first + len(heads)), heads["token"].astype(np.int64)
        parents = np.minimum(heads["parent"], np.uint64(2**62)).astype(np.int64)
        if first == 0:
            if parents[0] != 0:
                raise _damaged(self._trie, "its first node is no root")
            heads, ids, tokens, parents = heads[1:], ids[1:], tokens[1:], parents[1:]
        if (parents >= ids).any():
            raise _damaged(self._trie, "a node is before its parent, or its parent is not there")
        wrong = tokens[(tokens < 0) | (tokens >= self._spec.vocab_size)]
        if len(wrong):
            raise ValueError(
                f"{self._trie} has token {wrong[0]}, and the vocabulary has {self._spec.vocab_size}; give the "
                "tokenizer that its n-grams were counted with."
            )
        if (heads["count"] < 0).any():
            raise _damaged(self._trie, "it counts an n-gram less often than never")
        left = ids
        while len(left):
            # Of the remaining nodes, those whose parent is known by now: it may be in the same chunk.
            ready = self._depths[parents] > 0
            now, above = left[ready], parents[ready]
            if self._depths[above].max() > self._spec.order:
                raise _damaged(self._trie, f"it has n-grams longer than its order {self._spec.order}")
            self._keys[now] = (self._keys[above] << self._spec.bits) | tokens[ready]
            self._depths[now] = self._depths[above] + 1
            left, parents, tokens = left[~ready], parents[~ready], tokens[~ready]
        counts, lengths, keys = heads["count"].astype(np.int64), self._depths[ids] - 1, self._keys[ids]
        for length in range(1, self._spec.order + 1):
            own = (lengths == length) & (counts > 0)
            if length == 1:
                np.add.at(writer.unigrams, keys[own], counts[own])
                continue
            order = keys[own].argsort()
            writer.append(length, keys[own][order], counts[own][order])
