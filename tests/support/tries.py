"""DART's own trie, written down plainly."""

from __future__ import annotations

import struct
from random import Random
from typing import Any


class Trie:
    """DART's trie as its paper's code fills, reduces and saves it: an independent, plain reference."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.nodes: list[dict[str, Any]] = [{"token": 0, "parent": 0, "count": 0, "children": {}}]

    def child(self, node: int, token: int) -> int:
        children = self.nodes[node]["children"]
        if token not in children:
            children[token] = len(self.nodes)
            self.nodes.append({"token": token, "parent": node, "count": 0, "children": {}})
        return int(children[token])

    def add(self, document: list[int]) -> Trie:
        for start in range(len(document)):
            node = 0
            self.nodes[0]["count"] += 1
            for token in document[start : start + self.order]:
                node = self.child(node, token)
                self.nodes[node]["count"] += 1
        return self

    def probability(self, context: list[int], token: int) -> float:
        """What its search asks for; 0 where that would divide 0 by 0."""
        for length in range(min(self.order - 1, len(context)), 0, -1):
            node: int | None = 0
            for one in context[len(context) - length :]:
                node = None if node is None else self.nodes[node]["children"].get(one)
            below = None if node is None else self.nodes[node]["children"].get(token)
            if below is not None:
                assert node is not None
                count = self.nodes[below]["count"]
                return float(count / self.nodes[node]["count"]) if count else 0.0
        return 0.0

    def reduced(self, threshold: int) -> Trie:
        """Without nodes below the threshold, whose counts are taken off all ancestors; the root's goes below 0."""
        smaller = Trie(self.order)

        def visit(node: int, copy: int) -> int:
            dropped = 0
            for token, below in self.nodes[node]["children"].items():
                if self.nodes[below]["count"] < threshold:
                    dropped += self.nodes[below]["count"]
                    continue
                kept = smaller.child(copy, token)
                smaller.nodes[kept]["count"] = self.nodes[below]["count"]
                dropped += visit(below, kept)
            smaller.nodes[copy]["count"] -= dropped
            return dropped

        visit(0, 0)
        return smaller

    def shuffled(self, random: Random) -> Trie:
        """The same n-grams, met in another order."""
        other = Trie(self.order)
        waiting = [(0, 0)]
        while waiting:
            node, copy = waiting.pop(random.randrange(len(waiting)))
            other.nodes[copy]["count"] = self.nodes[node]["count"]
            children = list(self.nodes[node]["children"].items())
            random.shuffle(children)
            waiting += [(below, other.child(copy, token)) for token, below in children]
        return other

    def saved(self) -> bytes:
        parts = [struct.pack("<QQ", self.order, len(self.nodes))]
        for node in self.nodes:
            head = (node["token"], node["parent"], node["count"], len(node["children"]))
            parts.append(struct.pack("<iQiQ", *head))
            parts += [struct.pack("<iQ", token, below) for token, below in node["children"].items()]
        return b"".join(parts)
