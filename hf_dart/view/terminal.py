"""Terminal drawings: text with drafted tokens coloured, one draft tree, bars."""

from __future__ import annotations

from typing import Any

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


def tree_lines(pen: Pen, tokenizer: Any, one: Any) -> list[str]:
    """One line per node of row 0 of a round; those that the target's text passes through are filled.

    Args:
        one: a `hf_dart.decoding.trace.TracedRound`.
    """
    tokens, parents, path = one.tokens[0], one.parents[0], set(one.paths[0])
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if parent >= 0:
            children.setdefault(parent, []).append(node)
    lines = [f"● {tokenizer.decode([tokens[0]])!r}  (already written)"]

    def draw(node: int, indent: str) -> None:
        below = children.get(node, [])
        for place, child in enumerate(below):
            last = place == len(below) - 1
            label = repr(tokenizer.decode([tokens[child]]))
            mark = pen(GREEN, f"● {label}") if child in path else f"○ {label}"
            lines.append(f"{indent}{'└─' if last else '├─'}{mark}")
            draw(child, indent + ("  " if last else "│ "))

    draw(0, "")
    return lines


def bars(values: list[float], width: int = 40) -> list[str]:
    """One bar per depth from 1 on; `values` are shares of 1."""
    return [
        f"{depth:>4}  {'█' * round(width * value):<{width}} {100 * value:>3.0f} %"
        for depth, value in enumerate(values, start=1)
    ]
