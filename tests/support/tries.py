"""Files of DART's own tries, written down plainly."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from random import Random

Gram = tuple[int, ...]


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
