"""Reader of `.trie` files, in which DART's own code (arXiv 2601.19278) keeps its n-grams, into an `NgramTable`.

Little-endian and packed: `u64 order, u64 nodes`, then every node, `i32 token, u64 parent, i32 count, u64 children` and
its children, `i32 token, u64 node` each. Node 0 is the root; a parent stands in front of its children. That makes 36
bytes per node and 4 more. A node stands for the n-gram on the way to it, and its count is how often that occurs; the
root's is not looked at (it may even be negative in files that were reduced).

Memory is bounded whatever the size of a file: what is known of its nodes lies on disk, 21 bytes for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import numpy as np

from hf_dart.models.tokenizers import vocabulary_hash
from hf_dart.trees.ngram.build import TableWriter, folder_of, merge
from hf_dart.trees.ngram.lookup import Array
from hf_dart.trees.ngram.table import NgramSpec, NgramTable

CHUNK = 2**20
"""Nodes that are taken in at a time."""
_HEADER = np.dtype([("order", "<u8"), ("nodes", "<u8")])
_NODE = np.dtype([("token", "<i4"), ("parent", "<u8"), ("count", "<i4"), ("children", "<u8")])
_CHILD = np.dtype([("token", "<i4"), ("node", "<u8")])

Progress = Callable[[str], object]


def read_trie(
    trie: str | Path,
    path: str | Path,
    *,
    tokenizer: Any = None,
    vocab_size: int | None = None,
    chunk: int = CHUNK,
    progress: Progress = lambda line: None,
) -> NgramTable:
    """Write the n-grams of a `.trie` file into a new table.

    N-grams with a count of 0, as reducing a trie leaves them, are left out; so is the root's count.

    Args:
        trie: the file to read.
        path: of the table to write.
        tokenizer: that the n-grams were counted with, whose hash and size are kept in the table.
        vocab_size: V, where there is no tokenizer to ask.
        chunk: nodes that are taken in at a time; each needs about 150 bytes of memory.
        progress: called with one line now and then.

    Raises:
        ValueError: it is no such file, it is damaged or contradicts itself, or has tokens beyond the vocabulary.
    """
    trie, path = Path(trie), Path(path)
    if vocab_size is None and tokenizer is None:
        raise ValueError("The size of the vocabulary is not known; give tokenizer= or vocab_size=.")
    if not trie.is_file():
        raise ValueError(f"There is no file {trie}; give a .trie file of DART's n-grams.")
    with open(trie, "rb") as file:
        order, nodes = _read_header(file, trie)
        hashed = None if tokenizer is None else vocabulary_hash(tokenizer)
        spec = NgramSpec(order, vocab_size or len(tokenizer), hashed)
        with TemporaryDirectory(dir=folder_of(path), prefix=".trie-") as folder:
            known, parts = _Known(Path(folder), nodes, spec, trie), list[Path]()
            for first, heads, children in _chunks(file, nodes, chunk, spec.vocab_size, trie):
                writer = TableWriter(Path(folder), spec)
                tokens = known.take(first, heads, children, writer)
                parts.append(Path(folder) / f"part-{first}")
                writer.finish(parts[-1], tokens, (1,) * (order - 1))
                progress(f"{first + len(heads)} of {nodes} nodes read")
            return merge(parts, path, progress=progress)


def _damaged(trie: Path, what: str) -> ValueError:
    return ValueError(f"{trie} is no whole .trie file: {what}; fetch it again.")


def _read_header(file: BinaryIO, trie: Path) -> tuple[int, int]:
    """Order and number of nodes; the latter is as the size of the file says."""
    size = trie.stat().st_size
    head = np.frombuffer(file.read(_HEADER.itemsize), dtype=np.uint8)
    if len(head) < _HEADER.itemsize:
        raise _damaged(trie, f"it has {size} bytes")
    order, nodes = (int(number) for number in head.view(_HEADER)[0])
    fits = _HEADER.itemsize + nodes * _NODE.itemsize + (nodes - 1) * _CHILD.itemsize
    if nodes < 1 or size != fits:
        raise _damaged(trie, f"{nodes} nodes take {fits} bytes and it has {size}")
    return order, nodes


def _chunks(file: BinaryIO, nodes: int, chunk: int, vocab_size: int, trie: Path) -> Iterator[tuple[int, Array, Array]]:
    """Yield chunks: the number of the first node, the heads of the next ones, and all their children's entries.

    There are up to `chunk` heads, and up to `chunk` entries or those of one node.
    """
    rest, first, most = b"", 0, nodes - 1
    while first < nodes:
        content = memoryview(rest + file.read(max(chunk * _NODE.itemsize - len(rest), 0)))
        begins: list[int] = []
        place, listed, wanted = 0, 0, min(chunk, nodes - first)
        while len(begins) < wanted:
            head_end = place + _NODE.itemsize
            if head_end > len(content):
                content = _longer(file, content, head_end, trie)
            children = int.from_bytes(content[head_end - 8 : head_end], "little")
            if children > min(most, vocab_size):
                raise _damaged(trie, f"node {first + len(begins)} has {children} children")
            if begins and listed + children > chunk:
                break
            most, listed = most - children, listed + children
            begins.append(place)
            place = head_end + children * _CHILD.itemsize
            if place > len(content):
                content = _longer(file, content, place, trie)
        data, at = np.frombuffer(content, dtype=np.uint8), np.array(begins)
        heads = data[at[:, None] + np.arange(_NODE.itemsize)].view(_NODE)[:, 0]
        owners = np.repeat(np.arange(len(at)) + 1, heads["children"].astype(np.int64))
        places = np.arange(listed) * _CHILD.itemsize + owners * _NODE.itemsize
        entries = data[places[:, None] + np.arange(_CHILD.itemsize)].view(_CHILD)[:, 0]
        rest = bytes(content[place:])
        yield first, heads, entries
        first += len(heads)
    if rest or file.read(1):
        raise _damaged(trie, "bytes are left over after its last node")


def _longer(file: BinaryIO, content: memoryview, wanted: int, trie: Path) -> memoryview:
    longer = memoryview(bytes(content) + file.read(max(wanted - len(content), len(content) // 4)))
    if len(longer) < wanted:
        raise _damaged(trie, "it ends inside a node")
    return longer


class _Known:
    """Facts known of nodes so far, in files: their parents, their n-grams, their depth."""

    def __init__(self, folder: Path, nodes: int, spec: NgramSpec, trie: Path) -> None:
        def array(name: str, dtype: str) -> Array:
            return np.memmap(folder / name, dtype=dtype, mode="w+", shape=(nodes,))

        self._spec, self._trie, self._nodes = spec, trie, nodes
        # New files are filled with zeros, so numbers are stored plus one.
        self._listed_by, self._listed_as = array("listed_by", "i8"), array("listed_as", "i4")
        self._keys, self._depths = array("keys", "i8"), array("depths", "u1")
        self._depths[0] = 1

    def take(self, first: int, heads: Array, entries: Array, writer: TableWriter) -> int:
        """Check the next nodes and write their n-grams; returns the sum of the counts of single tokens."""
        ids = np.arange(first, first + len(heads))
        self._list_children(ids, heads, entries)
        if first == 0:
            if heads["parent"][0] != 0:
                raise _damaged(self._trie, "its first node is no root")
            ids, heads = ids[1:], heads[1:]
        parents, tokens = heads["parent"].astype(np.int64), heads["token"].astype(np.int64)
        if (self._listed_by[ids] != parents + 1).any() or (self._listed_as[ids] != tokens).any():
            raise _damaged(self._trie, "a node and its parent's list of children contradict each other")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._spec.vocab_size:
            wrong = tokens.min() if tokens.min() < 0 else tokens.max()
            raise ValueError(
                f"{self._trie} has token {wrong}, and the vocabulary has {self._spec.vocab_size}; give the tokenizer "
                "that its n-grams were counted with."
            )
        if len(tokens) and heads["count"].min() < 0:
            raise _damaged(self._trie, "it counts an n-gram less often than never")
        self._find_keys(ids, parents, tokens)
        return self._write(ids, heads["count"], writer)

    def _list_children(self, ids: Array, heads: Array, entries: Array) -> None:
        owners = np.repeat(ids, heads["children"].astype(np.int64))
        children = entries["node"]
        # As u64, or a number beyond 2^63 would be negative.
        if ((children <= owners.astype(np.uint64)) | (children >= self._nodes)).any():
            raise _damaged(self._trie, "a node is before its parent, or not there")
        # All entries of a node are in this chunk, so a duplicate token is found here.
        named = (owners - ids[0]) << 32 | entries["token"].view(np.uint32) if len(owners) else owners
        if len(np.unique(named)) < len(named):
            raise _damaged(self._trie, "a node has two children of one token")
        children = children.astype(np.int64)
        if (self._listed_by[children] != 0).any() or len(np.unique(children)) < len(children):
            raise _damaged(self._trie, "a node is the child of two nodes")
        self._listed_by[children] = owners + 1
        self._listed_as[children] = entries["token"]

    def _find_keys(self, ids: Array, parents: Array, tokens: Array) -> None:
        for _ in range(self._spec.order):
            # Of the remaining nodes, those whose parent is known by now: it may be in the same chunk.
            ready = self._depths[parents] > 0
            now, above = ids[ready], parents[ready]
            self._keys[now] = (self._keys[above] << self._spec.bits) | tokens[ready]
            self._depths[now] = self._depths[above] + 1
            ids, parents, tokens = ids[~ready], parents[~ready], tokens[~ready]
            if not len(ids):
                break
        if len(ids):
            raise _damaged(self._trie, f"it has n-grams longer than its order {self._spec.order}")

    def _write(self, ids: Array, counts: Array, writer: TableWriter) -> int:
        depths, keys = self._depths[ids] - 1, self._keys[ids]
        if len(depths) and depths.max() > self._spec.order:
            raise _damaged(self._trie, f"it has n-grams longer than its order {self._spec.order}")
        for depth in range(1, self._spec.order + 1):
            own = (depths == depth) & (counts > 0)
            mine, how_often = keys[own], counts[own].astype(np.int64)
            if depth == 1:
                np.add.at(writer.unigrams, mine, how_often)
                continue
            order = mine.argsort()
            writer.append(depth, mine[order], how_often[order])
        return int(writer.unigrams.sum())
