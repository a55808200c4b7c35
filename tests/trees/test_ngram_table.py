"""N-gram tables: counted as by hand, merged and pruned, read back, and refused where damaged."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ngrams import VOCABULARY, by_hand, corpus, unpacked
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_dart import NgramTable
from hf_dart.models.tokenizers import vocabulary_hash
from hf_dart.trees.ngram import build as ngram_build
from hf_dart.trees.ngram.build import build, merge
from hf_dart.trees.ngram.table import MOST_COUNTED, NgramSpec


@pytest.fixture
def table(tmp_path: Path) -> NgramTable:
    return build(corpus(), tmp_path / "table", vocab_size=VOCABULARY)


@pytest.mark.parametrize("order", [2, 3, 5])
@pytest.mark.parametrize("chunk", [7, 50, 10**6])
def test_counts_as_by_hand(tmp_path: Path, chunk: int, order: int) -> None:
    """Documents longer than a chunk, several in one, and empty ones."""
    documents = [*corpus(), [], [3], [3, 4]]
    table = build(documents, tmp_path / "table", order=order, vocab_size=VOCABULARY, chunk=chunk)
    assert unpacked(table) == by_hand(documents, order)
    assert unpacked(NgramTable.load(table.path)) == by_hand(documents, order)
    assert table.tokens == sum(map(len, documents))


@pytest.mark.parametrize("chunk", [5, 40, 10**6])
def test_one_long_array_is_cut_behind_its_end_tokens(tmp_path: Path, chunk: int) -> None:
    documents = [[*(token or 1 for token in document), 0] for document in corpus()]
    flat = np.concatenate(documents).astype(np.uint16)
    cut = build(flat, tmp_path / "cut", vocab_size=VOCABULARY, eos=0, chunk=chunk)
    assert unpacked(cut) == by_hand(documents, 3)
    uncut = build(flat, tmp_path / "uncut", vocab_size=VOCABULARY, chunk=chunk)
    assert unpacked(uncut) == by_hand([flat.tolist()], 3)


def test_many_small_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tables are merged, keys range by range."""
    monkeypatch.setattr(ngram_build, "_MERGED_AT_ONCE", 40)
    documents, lines = corpus(documents=40), list[str]()
    table = build(documents, tmp_path / "table", vocab_size=VOCABULARY, chunk=50, progress=lines.append)
    assert unpacked(table) == by_hand(documents, 3)
    assert int(lines[-1].split()[-2]) > 10, "tables"
    assert list(tmp_path.iterdir()) == [table.path], "nothing else is left behind"


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words."""
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "c": 3, "d": 4}, unk_token="d"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="d")


TEXTS, IDS = ["a b c a b", "b", "c a b c z"], [[1, 2, 3, 1, 2, 0], [2, 0], [3, 1, 2, 3, 4, 0]]


@pytest.mark.parametrize("rows", [[{"text": one, "label": 1} for one in TEXTS], [{"text": ids} for ids in IDS], TEXTS])
def test_texts_and_data_sets(tmp_path: Path, rows: Any) -> None:
    table = build(iter(rows), tmp_path / "table", order=4, tokenizer=words(), eos=0, chunk=4)
    assert unpacked(table) == by_hand(IDS, 4)
    assert table.spec == NgramSpec(4, 5, vocabulary_hash(words()))


def test_what_cannot_be_counted(tmp_path: Path) -> None:
    for documents, options, message in (
        ([[1, 2]], {}, "give tokenizer= or vocab_size="),
        ([[1, 5]], {"vocab_size": 5}, "token 5, and the vocabulary ends at 4"),
        ([[1, -1]], {"vocab_size": 5}, "token -1"),
        ([[]], {"vocab_size": 5}, "nothing to count"),
        ([], {"vocab_size": 5}, "nothing to count"),
        (["a"], {"vocab_size": 5}, "give tokenizer="),
        ([[0.5]], {"vocab_size": 5}, "neither a text nor"),
        ([[1]], {"vocab_size": 5, "order": 22}, "give 2 to 21, so that an n-gram fits into 63 bits"),
        ([[1]], {"vocab_size": 2**21 + 1, "order": 3}, "give 2 to 2, so that"),
        ([[1]], {"vocab_size": 5, "order": 1}, "give 2 to 21"),
        ([[1]], {"vocab_size": 5, "min_counts": (3, 2)}, "none smaller than the one before"),
        ([[1]], {"vocab_size": 5, "min_counts": (1, 2, 3)}, "up to 2 numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            build(documents, tmp_path / "table", **options)
    with pytest.raises(ValueError, match="There is no folder"):
        build([[1]], tmp_path / "nowhere" / "table", vocab_size=5)
    assert not list(tmp_path.iterdir())
    assert NgramSpec(3, 2**21).bits == 21


def test_merged_shards_are_the_whole(tmp_path: Path) -> None:
    documents = corpus(documents=20)
    whole = build(documents, tmp_path / "whole", vocab_size=VOCABULARY)
    shards = [build(documents[n::3], tmp_path / f"shard{n}", vocab_size=VOCABULARY).path for n in range(3)]
    merged = merge(shards, tmp_path / "merged")
    assert merged.path.read_bytes() == whole.path.read_bytes()
    for name, options in (("order", {"order": 4}), ("vocabulary", {"vocab_size": VOCABULARY + 1})):
        other = build(documents, tmp_path / name, **{"vocab_size": VOCABULARY, **options})
        with pytest.raises(ValueError, match="not counted alike"):
            merge([whole.path, other.path], tmp_path / "merged")


def test_pruned(tmp_path: Path) -> None:
    documents = corpus(documents=20)
    full = build(documents, tmp_path / "full", order=4, vocab_size=VOCABULARY)
    pruned = build(documents, tmp_path / "pruned", order=4, vocab_size=VOCABULARY, min_counts=(1, 3))
    wanted = {ngram: count for ngram, count in by_hand(documents, 4).items() if count >= 3 or len(ngram) < 3}
    assert unpacked(pruned) == wanted
    assert pruned.min_counts == (1, 3, 3)
    assert merge([full.path], tmp_path / "again", min_counts=(1, 3)).path.read_bytes() == pruned.path.read_bytes()
    assert merge([pruned.path], tmp_path / "kept").min_counts == (1, 3, 3)


def test_shards_pruned_in_different_ways(tmp_path: Path) -> None:
    """What one of them kept is kept, and the file says so."""
    documents = corpus(documents=20)
    full = build(documents, tmp_path / "full", vocab_size=VOCABULARY)
    pruned = build(documents, tmp_path / "pruned", vocab_size=VOCABULARY, min_counts=(2, 4))
    merged = merge([pruned.path, full.path], tmp_path / "merged")
    assert merged.min_counts == (1, 1)
    assert unpacked(NgramTable.load(merged.path)) == unpacked(pruned) + unpacked(full)
    again = merge([pruned.path, full.path], tmp_path / "again", min_counts=(1, 3))
    assert again.min_counts == NgramTable.load(again.path).min_counts == (1, 3)


def test_counts_stop_at_their_largest(tmp_path: Path, table: NgramTable) -> None:
    """Shards of a corpus so large that uint32 is too small; single tokens are counted on."""
    writer, factor = ngram_build.TableWriter(tmp_path, table.spec), 10**9
    writer.unigrams += table.unigrams * factor
    for order, (keys, counts) in enumerate(zip(table.keys, table.counts, strict=True), start=2):
        writer.append(order, keys, counts.astype(np.int64) * factor)
    writer.finish(tmp_path / "shard", table.tokens * factor, table.min_counts)
    merged = merge([tmp_path / "shard"] * 5, tmp_path / "merged")
    expected = {
        ngram: count * 5 * factor if len(ngram) == 1 else min(5 * min(count * factor, MOST_COUNTED), MOST_COUNTED)
        for ngram, count in by_hand(corpus(), 3).items()
    }
    assert unpacked(NgramTable.load(merged.path)) == expected
    contexts = np.array([[a, b] for a in range(VOCABULARY) for b in range(VOCABULARY)])
    shares = merged.probabilities(contexts, np.tile(np.arange(VOCABULARY), (len(contexts), 1)))
    assert 0 <= shares.min() < shares.max() <= 1


def test_copies_share_the_file(table: NgramTable) -> None:
    assert copy.deepcopy(table) is table
    again = pickle.loads(pickle.dumps(table))
    assert len(pickle.dumps(table)) < 1000
    assert unpacked(again) == unpacked(table)
    with pytest.raises(ValueError, match="read-only"):
        table.keys[0][0] = 0
