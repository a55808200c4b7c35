"""`NgramTable`: how often token sequences occur in a corpus, memory-mapped, for scores that hang together.

DART (arXiv 2601.19278, section 3.3) prunes its draft tree with a trie of 1.3 billion n-grams that takes 100 GB of
memory. Here the same counts are sorted arrays in one safetensors file, 12 bytes per n-gram, of which only the pages
that are looked at are ever read. `docs/ngram_table.md` describes the file; `build` makes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from hf_dart.trees.costs import Array

FORMAT, VERSION = "hf_dart.trees.ngram", "1"
MOST_COUNTED = 2**32 - 1  # counts of bigrams and longer stop here
_LARGEST_VOCABULARY = 2**31


@dataclass(frozen=True)
class NgramSpec:
    """Order and vocabulary of a table, which its keys are packed by.

    Args:
        order: n, the length of the longest n-grams.
        vocab_size: V; token ids lie below it.
        tokenizer_hash: `hf_dart.models.tokenizers.vocabulary_hash` of the V first tokens of the tokenizer that the
            corpus was tokenized with, or None if not recorded.

    Raises:
        ValueError: an n-gram of that order does not fit into 63 bits.
    """

    order: int
    vocab_size: int
    tokenizer_hash: str | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.vocab_size <= _LARGEST_VOCABULARY:
            raise ValueError(f"vocab_size is {self.vocab_size}; give 2 to {_LARGEST_VOCABULARY}.")
        longest = 63 // self.bits
        if not 2 <= self.order <= longest:
            raise ValueError(
                f"order is {self.order}; with a vocabulary of {self.vocab_size} tokens ({self.bits} bits each) give 2 "
                f"to {longest}, so that an n-gram fits into 63 bits."
            )

    @property
    def bits(self) -> int:
        """Bits of one token in a key: ⌈log2 V⌉."""
        return (self.vocab_size - 1).bit_length()


class NgramTable:
    """Counts of the n-grams of a corpus, read from a file as they are needed.

    `NgramTable.load(path)` opens one, `hf_dart.trees.ngram.build.build` counts one. A table is never changed; copies
    and pickles of it share the file.

    Attributes:
        path: of the file.
        spec: what the keys mean ([`NgramSpec`]).
        tokens: how many tokens the corpus has.
        min_counts: per order from 2 on, the smallest count that was kept.
        unigrams: [V] int64 counts of single tokens.
        keys: per order from 2 on, sorted int64 keys of n-grams; the last token is in the lowest bits.
        counts: per order from 2 on, their uint32 counts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # As torch tensors, since these are views of the mapped file; safetensors' NumPy arrays are copies.
            with safe_open(path, framework="pt") as file:
                metadata, names = file.metadata() or {}, set(file.keys())
                self.spec, self.tokens, self.min_counts = _read_metadata(path, metadata)
                orders = range(2, self.spec.order + 1)
                wanted = {f"{what}.{order}" for order in orders for what in ("keys", "counts")} | {"counts.1"}
                if names != wanted:
                    raise ValueError(f"{path} is no whole n-gram table: it has tensors {sorted(names)[:8]}.")
                arrays = {name: file.get_tensor(name).numpy() for name in names}
        except (SafetensorError, OSError, TypeError) as error:
            raise ValueError(f"{path} cannot be read as an n-gram table ({error}); build or fetch it again.") from error
        for array in arrays.values():
            array.flags.writeable = False
        self.unigrams = arrays["counts.1"]
        self.keys = [arrays[f"keys.{order}"] for order in orders]
        self.counts = [arrays[f"counts.{order}"] for order in orders]
        self._check_shapes()

    @classmethod
    def load(cls, path: str | Path) -> NgramTable:
        """Open the n-gram table in a file, which stays there and is read as it is needed.

        Only its head is looked at: a wrong table cannot change what is generated, only how fast.

        Raises:
            ValueError: it is no such file, or a damaged one.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"There is no file {path}; `hf-dart ngram build` makes a table.")
        return cls(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return NgramTable, (self.path,)

    def __deepcopy__(self, memo: dict[int, Any]) -> NgramTable:
        return self

    @property
    def sizes(self) -> list[int]:
        """Numbers of different n-grams of each order, from single tokens on."""
        return [int(np.count_nonzero(self.unigrams)), *map(len, self.keys)]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.unigrams.nbytes + sum(array.nbytes for array in (*self.keys, *self.counts))

    def check_vocabulary(self, tokenizer_hash: str | None, rows: int) -> None:
        """Compare with the tokenizer of a target whose embedding table has so many rows.

        Raises:
            ValueError: its ids mean other tokens.
        """
        if self.spec.tokenizer_hash is not None and tokenizer_hash is not None:
            fits = self.spec.tokenizer_hash == tokenizer_hash
        else:
            fits = self.spec.vocab_size <= rows
        if not fits:
            raise ValueError(
                f"The n-grams of {self.path} were counted with another tokenizer than the target's; build one with "
                f"`hf-dart ngram build --tokenizer` of this target, and `--vocab-size {rows}` if it has more tokens."
            )

    def probabilities(self, contexts: Array, candidates: Array) -> Array:
        """Probability of each candidate after each context.

        As in DART's trie: count(context + candidate) / count(context) for the longest context, of 1 to order - 1
        tokens, after which the corpus has the candidate; 0 where there is none.

        Args:
            contexts: [..., C] the tokens before, the last one last; one that is no token ends the context.
            candidates: [..., K] token ids, which may broadcast; what is no token has probability 0.

        Returns:
            [..., K] float64.
        """
        return self.after(self.known(contexts), self.known(candidates))

    def known(self, tokens: Array) -> Array:
        """Replace ids that are no tokens of the table by -1."""
        return np.where((tokens >= 0) & (tokens < self.spec.vocab_size), tokens, -1)

    def after(self, contexts: Array, candidates: Array) -> Array:
        """Return `probabilities` of ids that are `known`; each order is looked up once for all of them."""
        width, bits = candidates.shape[-1], self.spec.bits
        found = np.zeros(candidates.shape)
        longest = min(contexts.shape[-1], len(self.keys))
        if longest == 0:
            return np.broadcast_to(found, (*contexts.shape[:-1], width))
        # A key is negative, and in no table, where one of its tokens or its context is unknown.
        packed = contexts[..., -1]
        totals = np.where(packed >= 0, self.unigrams[packed], 0.0)
        for length in range(1, longest + 1):
            keys = (packed << bits)[..., None] | candidates
            if length < longest:
                # The next longer context is an n-gram of this order, too.
                packed = (contexts[..., -length - 1] << (length * bits)) | packed
                keys = np.concatenate([keys, packed[..., None]], -1)
            counts = self._counted(length + 1, keys)
            totals, shares = counts[..., -1], counts[..., :width] / totals.clip(min=1.0)[..., None]
            found = np.where(shares > 0, shares, found)
        return found.clip(max=1.0)

    def _counted(self, order: int, keys: Array) -> Array:
        """Return counts [...] of n-grams of one order, 2 or more, as floats; 0 for those that the table lacks."""
        known = self.keys[order - 2]
        if not len(known):
            return np.zeros(keys.shape)
        places = np.minimum(known.searchsorted(keys), len(known) - 1)
        return np.where(known[places] == keys, self.counts[order - 2][places], 0).astype(np.float64)

    def _check_shapes(self) -> None:
        same = self.unigrams.dtype == np.int64 and self.unigrams.shape == (self.spec.vocab_size,)
        for keys, counts in zip(self.keys, self.counts, strict=True):
            same = same and keys.dtype == np.int64 and counts.dtype == np.uint32
            same = same and keys.ndim == 1 and keys.shape == counts.shape
        if not same:
            raise ValueError(
                f"The arrays of {self.path} do not have the shapes and types of an n-gram table (int64 keys, uint32 "
                "counts, one int64 count per token of the vocabulary); build or fetch it again."
            )


def _read_metadata(path: Path, metadata: dict[str, str]) -> tuple[NgramSpec, int, tuple[int, ...]]:
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is no n-gram table; `hf-dart ngram build` makes one.")
    if metadata.get("version") != VERSION:
        raise ValueError(
            f"{path} is an n-gram table of version {metadata.get('version')!r}, and this hf-dart reads version "
            f"{VERSION}; build it again."
        )
    try:
        order, vocab_size, tokens = (int(metadata[name]) for name in ("order", "vocab_size", "tokens"))
        min_counts = tuple(int(count) for count in metadata["min_counts"].split(","))
        spec = NgramSpec(order, vocab_size, metadata.get("tokenizer_hash") or None)
    except (KeyError, ValueError) as error:
        raise ValueError(f"The head of {path} is damaged ({error}); build or fetch it again.") from error
    if not 0 <= tokens < 2**62 or len(min_counts) != order - 1 or not 1 <= min(min_counts) <= max(min_counts) < 2**32:
        raise ValueError(f"The head of {path} is damaged (tokens, min_counts); build or fetch it again.")
    return spec, tokens, min_counts


def write_metadata(spec: NgramSpec, tokens: int, min_counts: Sequence[int]) -> dict[str, str]:
    """Metadata of a table's file, which `NgramTable` reads."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "order": str(spec.order),
        "vocab_size": str(spec.vocab_size),
        "tokenizer_hash": spec.tokenizer_hash or "",
        "tokens": str(tokens),
        "min_counts": ",".join(map(str, min_counts)),
    }
