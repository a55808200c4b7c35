"""Random corpora, and n-gram tables of them."""

from __future__ import annotations

from pathlib import Path
from random import Random

from hf_dart import NgramTable
from hf_dart.trees.ngram.build import build
from support import tiny

VOCABULARY = 13

Documents = list[list[int]]


def corpus(seed: int = 0, documents: int = 9, longest: int = 60, vocabulary: int = VOCABULARY) -> Documents:
    random = Random(seed)
    return [
        [min(int(random.expovariate(0.4)), vocabulary - 1) for _ in range(random.randrange(longest))]
        for _ in range(documents)
    ]


def random_table(path: Path, order: int = 3, vocabulary: int = tiny.VOCABULARY, seed: int = 0) -> NgramTable:
    """Counts of a text in which few tokens follow each other."""
    random = Random(seed)
    text = [0]
    for _ in range(4000):
        text.append((text[-1] * 5 + min(int(random.expovariate(0.4)), 9)) % vocabulary)
    return build([text[start : start + 50] for start in range(0, 4000, 50)], path, order=order, vocab_size=vocabulary)
