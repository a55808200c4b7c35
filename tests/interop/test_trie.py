"""`.trie` files of DART's own code: read into a table from any node order, in bounded memory, under attack."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random

import numpy as np
import pytest
from support.attacks import damaged, seeds, survives
from support.memory import traced_peak
from support.ngrams import by_hand, file_of, node, reduced, searched, trie_file, unpacked
from support.sentences import refused
from support.users import letters

from hf_dart import NgramTable
from hf_dart.interop import trie as reader
from hf_dart.interop.trie import read_trie
from hf_dart.trees.ngram import build as ngram_build
from hf_dart.trees.ngram.build import build

VOCABULARY = 12


def documents(seed: int, count: int = 30, vocabulary: int = VOCABULARY) -> list[list[int]]:
    random = Random(seed)
    # Squared, so that some tokens are frequent.
    return [[int(vocabulary * random.random() ** 2) for _ in range(random.randrange(0, 15))] for _ in range(count)]


def same(left: NgramTable, right: NgramTable) -> None:
    assert (left.spec, left.tokens) == (right.spec, right.tokens)
    pairs = [(left.unigrams, right.unigrams), *zip(left.keys, right.keys, strict=True)]
    for one, other in (*pairs, *zip(left.counts, right.counts, strict=True)):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("order", "chunk"), [(2, 2**20), (3, 11), (3, 2**20), (4, 60), (5, 40)])
def test_a_trie_is_the_table_of_its_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: int, chunk: int
) -> None:
    monkeypatch.setattr(reader, "_CHUNK", chunk)
    counts = by_hand(documents(order), order)
    table = build(documents(order), tmp_path / "built", order=order, vocab_size=VOCABULARY)
    for name, random in (("one", None), ("other", Random(1))):
        (tmp_path / name).write_bytes(trie_file(order, counts, random))
        read = read_trie(tmp_path / name, tmp_path / "table", vocab_size=VOCABULARY)
        same(read, table)
    assert {file.name for file in tmp_path.iterdir()} == {"built", "one", "other", "table"}


@pytest.mark.parametrize("threshold", [2, 4, 9])
def test_reduced_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threshold: int) -> None:
    """Their root counts less than nothing, and some of their n-grams were never seen on their own."""
    monkeypatch.setattr(reader, "_CHUNK", 10)
    first, middle, last = range(VOCABULARY, VOCABULARY + 3)
    texts = documents(1) + [[first, middle, last, other] for other in range(threshold)]
    counts = reduced(by_hand(texts, 3), threshold)
    found = counts[middle,], searched(counts, 3, [first, middle], last)
    assert found == (0, 1.0), "a token may be reduced to nothing, and a context that ends with it not"
    assert counts[()] < 0
    (tmp_path / "reduced").write_bytes(trie_file(3, counts))
    vocabulary = VOCABULARY + 3
    table = read_trie(tmp_path / "reduced", tmp_path / "table", vocab_size=vocabulary)
    # What its search finds is found here, also where a context's own end was never seen without it.
    every = [[first, last] for first in range(-1, vocabulary) for last in range(vocabulary)]
    tokens = np.arange(vocabulary)
    known = [[token for token in context if token >= 0] for context in every]
    wanted = [[searched(counts, 3, context, token) for token in range(vocabulary)] for context in known]
    assert table.probabilities(np.array(every), tokens).tolist() == wanted
    assert table.probabilities(np.array(every), np.tile(tokens, (len(every), 1))).tolist() == wanted


def test_the_largest_vocabulary_of_its_order(tmp_path: Path) -> None:
    """Three times 21 bits leave none to spare; and of the smallest file."""
    (tmp_path / "empty").write_bytes(trie_file(3, {}))
    assert read_trie(tmp_path / "empty", tmp_path / "table", vocab_size=VOCABULARY).sizes == [0, 0, 0]
    (tmp_path / "trie").write_bytes(trie_file(3, by_hand([[2**21 - 1] * 5 + [0, 2**21 - 1]], 3)))
    table = read_trie(tmp_path / "trie", tmp_path / "table", vocab_size=2**21)
    last = 2**21 - 1
    assert table.probabilities(np.array([[last, last]]), np.array([last, 0])).tolist() == [[0.75, 0.25]]


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_build, "_MERGED_AT_ONCE", 512)
    monkeypatch.setattr(reader, "_CHUNK", 512)

    def peaks(count: int) -> list[int]:
        """Nodes of a trie of ``count`` documents, and the bytes that reading it takes at most."""
        counts = by_hand(documents(0, count, vocabulary=200), 3)
        (tmp_path / "trie").write_bytes(trie_file(3, counts))
        reading = traced_peak(lambda: read_trie(tmp_path / "trie", tmp_path / "table", vocab_size=200))
        return [len(counts), reading]

    few, many = peaks(100), peaks(800)
    assert many[0] > 5 * few[0]
    assert many[1] < 1.6 * few[1], (few, many)


# ---- damage ------------------------------------------------------------------------------------------------


WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "0 bytes"),
    "no node": (struct.pack("<QQ", 3, 0), "0 nodes"),
    "more nodes than bytes": (struct.pack("<QQ", 3, 2**60), "nodes take"),
    "fewer nodes than bytes": (file_of(3, node(0, 0, 1)) + b"\0" * 36, "nodes take"),
    "an order that does not fit": (struct.pack("<QQ", 2**63, 1) + node(0, 0, 0), "order"),
    "an order of 1": (file_of(1, node(0, 0, 0)), "order"),
    "a root with a parent": (file_of(2, node(0, 5, 0)), "root"),
    "too many children": (struct.pack("<QQ", 3, 1) + struct.pack("<iQiQ", 0, 0, 0, 2**62), "children"),
    "a parent that is not there": (file_of(2, node(0, 0, 1, (1, 1)), node(1, 7, 1)), "not there"),
    "a parent of its own": (file_of(2, node(0, 0, 1, (1, 1)), node(1, 1, 1)), "before its parent"),
    "a parent beyond 2^63": (file_of(2, node(0, 0, 1, (1, 1)), node(1, 2**63 + 1, 1)), "not there"),
    "a negative token": (file_of(2, node(0, 0, 1, (-1, 1)), node(-1, 0, 1)), "token -1"),
    "a token beyond the vocabulary": (file_of(2, node(0, 0, 1, (99, 1)), node(99, 0, 1)), "token 99"),
    "a negative count": (file_of(2, node(0, 0, 1, (1, 1)), node(1, 0, -3)), "less often"),
    "an n-gram too long": (
        file_of(2, node(0, 0, 1, (1, 1)), node(1, 0, 1, (1, 2)), node(1, 1, 1, (1, 3)), node(1, 2, 1)), "longer"
    ),
    "cut off inside a node": (file_of(2, node(0, 0, 1, (1, 1)), node(1, 0, 1))[:-12] + b"\0\0\0\1" * 3, "children"),
}  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 1000])
@pytest.mark.parametrize("name", WRONG)
def test_damaged_tries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int) -> None:
    monkeypatch.setattr(reader, "_CHUNK", chunk)
    content, words = WRONG[name]
    (tmp_path / "trie").write_bytes(content)
    (tmp_path / "table").write_bytes(b"what was there")
    refused(lambda: read_trie(tmp_path / "trie", tmp_path / "table", vocab_size=VOCABULARY), ValueError, words)
    # Nothing was left over, nothing replaced.
    assert (tmp_path / "table").read_bytes() == b"what was there"
    assert {file.name for file in tmp_path.iterdir()} == {"trie", "table"}


def test_what_a_table_needs(tmp_path: Path) -> None:
    """A file, a folder, and a vocabulary, which the tokenizer says; its hash is kept."""
    trie, table = tmp_path / "trie", tmp_path / "table"
    refused(lambda: read_trie(trie, table, vocab_size=4), ValueError, "no file")
    trie.write_bytes(trie_file(2, by_hand(documents(0), 2)))
    refused(lambda: read_trie(trie, table), ValueError, "vocabulary")
    refused(lambda: read_trie(trie, tmp_path / "nowhere" / "table", vocab_size=4), ValueError, "no folder")
    refused(lambda: read_trie(trie, table, tokenizer=letters("abc")), ValueError, "tokenizer")
    spec = read_trie(trie, table, tokenizer=letters("abcdefghijkl")).spec
    assert (spec.vocab_size, spec.tokenizer_hash is not None) == (VOCABULARY, True)


@pytest.mark.parametrize("part", seeds(40, 1500))
def test_tries_under_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: range) -> None:
    monkeypatch.setattr(reader, "_CHUNK", 50)
    content = trie_file(3, reduced(by_hand(documents(2), 3), 3))
    for seed in part:
        (tmp_path / "trie").write_bytes(damaged(content, seed))

        def read() -> None:
            table = read_trie(tmp_path / "trie", tmp_path / "table", vocab_size=VOCABULARY)
            # Whatever was accepted is a table.
            assert all((np.diff(keys) > 0).all() for keys in table.keys)
            assert max(max(ngram) for ngram in unpacked(table)) < VOCABULARY

        survives(read)
        assert {file.name for file in tmp_path.iterdir()} <= {"trie", "table"}
