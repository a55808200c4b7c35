"""Terminal drawings: text with drafted tokens coloured, one draft tree, bars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_dart.trees.tree import DraftTree

GREEN, DIM, BOLD, PLAIN = "\033[32m", "\033[2m", "\033[1m", "\033[0m"


class Pen:
    """Colours, or leaves text as it is."""

    def __init__(self, color: bool) -> None:
        self.color = color

    def __call__(self, code: str, text: str) -> str:
        if not self.color or not text:
            return text
        # A reset at each line's end keeps pagers and copies clean.
        return "\n".join(f"{code}{line}{PLAIN}" if line else line for line in text.split("\n"))


def drafted_tokens(tokens: int, committed: Iterable[int]) -> list[bool]:
    """Which of a row's generated tokens were accepted drafts.

    The prefill gives the first token; of every round all but the last (the bonus token) were drafted.

    Args:
        tokens: how many the row has.
        committed: tokens per round.
    """
    drafted = [False]
    for count in committed:
        drafted += [True] * (count - 1) + [False] * min(count, 1)
    return drafted[:tokens]


def colored_text(pen: Pen, tokenizer: Any, prompt: str, ids: list[int], drafted: list[bool]) -> str:
    """The prompt dimmed, accepted draft tokens green, the target's own as they are."""
    pieces = [pen(DIM, prompt)]
    start = 0
    while start < len(ids):
        end = start
        while end < len(ids) and drafted[end] == drafted[start]:
            end += 1
        text = tokenizer.decode(ids[start:end], skip_special_tokens=True)
        pieces.append(pen(GREEN, text) if drafted[start] else text)
        start = end
    return "".join(pieces)


def tree_lines(pen: Pen, tokenizer: Any, tree: DraftTree, target: list[int]) -> list[str]:
    """One line per node of row 0; nodes that the target's text `target` passes through are filled.

    Args:
        target: the target's tokens after the root.
    """
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if parent >= 0:
            children.setdefault(parent, []).append(node)
    lines = [f"● {tokenizer.decode([tokens[0]])!r}  (already written)"]

    def draw(node: int, indent: str, accepted: bool, depth: int) -> None:
        below = children.get(node, [])
        for place, child in enumerate(below):
            last = place == len(below) - 1
            taken = accepted and depth < len(target) and tokens[child] == target[depth]
            label = repr(tokenizer.decode([tokens[child]]))
            mark = pen(GREEN, f"● {label}") if taken else f"○ {label}"
            lines.append(f"{indent}{'└─' if last else '├─'}{mark}")
            draw(child, indent + ("  " if last else "│ "), taken, depth + 1)

    draw(0, "", True, 0)
    return lines


def accepted_path(tree: DraftTree, target: list[int]) -> int:
    """How many nodes below the root of row 0 the text `target` passes through."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    node = 0
    for depth, token in enumerate(target):
        below = [child for child, parent in enumerate(parents) if parent == node and tokens[child] == token]
        if not below:
            return depth
        node = below[0]
    return len(target)


def bars(values: list[float], width: int = 40) -> list[str]:
    """One bar per depth from 1 on; `values` are shares of 1."""
    return [
        f"{depth:>4}  {'█' * round(width * value):<{width}} {100 * value:>3.0f} %"
        for depth, value in enumerate(values, start=1)
    ]
