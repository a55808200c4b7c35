"""Random corpora, n-gram tables of them, and files of DART's own tries, written down plainly."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

from hf_dart import NgramTable
from hf_dart.trees.ngram.build import build
from support import tiny

VOCABULARY = 13

Documents = list[list[int]]
Gram = tuple[int, ...]


def corpus(documents: int = 9) -> Documents:
    random = Random(0)
    return [
        [min(int(random.expovariate(0.4)), VOCABULARY - 1) for _ in range(random.randrange(60))]
        for _ in range(documents)
    ]


def by_hand(documents: Documents, order: int) -> Counter[tuple[int, ...]]:
    """Counts of all n-grams up to `order`."""
    return Counter(
        tuple(document[start : start + length])
        for document in documents
        for length in range(1, order + 1)
        for start in range(len(document) - length + 1)
    )


def unpacked(table: NgramTable) -> Counter[tuple[int, ...]]:
    """What a table counts."""
    bits = table.spec.bits
    found = Counter({(token,): int(count) for token, count in enumerate(table.unigrams) if count})
    for order, keys, counts in zip(range(2, table.spec.order + 1), table.keys, table.counts, strict=True):
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            found[tuple((key >> (bits * place)) & ((1 << bits) - 1) for place in reversed(range(order)))] = count
    return found


def back_off(counts: Counter[tuple[int, ...]], context: Sequence[int], token: int, order: int) -> float:
    """The paper's rule, word for word; a table that was pruned may hold an n-gram, and not its context."""
    known = [place for place, before in enumerate(context) if not counts[(before,)]]
    known = list(context[known[-1] + 1 :] if known else context)
    for length in range(min(order - 1, len(known)), 0, -1):
        front = tuple(known[len(known) - length :])
        if counts[(*front, token)]:
            return min(counts[(*front, token)] / max(counts[front], 1), 1.0)
    return 0.0


def random_table(path: Path, order: int = 3, vocabulary: int = tiny.VOCABULARY) -> NgramTable:
    """Counts of a text in which few tokens follow each other."""
    random = Random(0)
    text = [0]
    for _ in range(4000):
        text.append((text[-1] * 5 + min(int(random.expovariate(0.4)), 9)) % vocabulary)
    return build([text[start : start + 50] for start in range(0, 4000, 50)], path, order=order, vocab_size=vocabulary)


def node(token: int, parent: int, count: int, *children: tuple[int, int]) -> bytes:
    head = struct.pack("<iQiQ", token, parent, count, len(children))
    return head + b"".join(struct.pack("<iQ", *child) for child in children)


def file_of(order: int, *nodes: bytes) -> bytes:
    return struct.pack("<QQ", order, len(nodes)) + b"".join(nodes)


def trie_file(order: int, counts: Mapping[Gram, int], random: Random | None = None) -> bytes:
    """Counts of n-grams as DART's code saves them, in their order or a random one; contexts come first."""
    place: dict[Gram, float] = {(): 0.0}
    for gram in counts:
        if gram:
            place[gram] = len(place) if random is None else place[gram[:-1]] + random.random()
    number = {gram: at for at, gram in enumerate(sorted(place, key=place.__getitem__))}
    children: dict[Gram, list[tuple[int, int]]] = {gram: [] for gram in number}
    for gram in [*number][1:]:
        children[gram[:-1]].append((gram[-1], number[gram]))
    heads = ((gram[-1] if gram else 0, number[gram[:-1]], counts.get(gram, 0)) for gram in number)
    return file_of(order, *(node(*head, *below) for head, below in zip(heads, children.values(), strict=True)))


def reduced(counts: Mapping[Gram, int], threshold: int) -> Counter[Gram]:
    """Counts without those below the threshold, which are taken off all contexts, as DART's code does it."""
    kept = Counter({gram: count for gram, count in counts.items() if count >= threshold})
    for gram, count in counts.items():
        if count < threshold and (len(gram) == 1 or counts[gram[:-1]] >= threshold):
            for length in range(len(gram)):
                kept[gram[:length]] -= count
    return kept


def searched(counts: Mapping[Gram, int], order: int, context: list[int], token: int) -> float:
    """What its search finds for a token after a context; 0 where that would divide 0 by 0."""
    for length in range(min(order - 1, len(context)), 0, -1):
        front = tuple(context[-length:])
        if (*front, token) in counts:
            return counts[*front, token] / (counts[front] or 1)
    return 0.0
