"""One verified tree as SVG: its nodes with their chances, and the path that the target took."""

from __future__ import annotations

from collections.abc import Callable
from math import exp

from hf_dart.view.records import Round
from hf_dart.view.svg import Drawing

_COLUMN, _ROW, _BOX, _TOP = 132, 24, 116, 34
ROOT, ACCEPTED, LEFT, BONUS = "#999999", "#9fe2c6", "#eeeeee", "#a9d3f2"


def tree_picture(one: Round, row: int, label: Callable[[int], str], title: str, bonus: int) -> str:
    """The tree of a row in one round.

    Args:
        label: what to write into the node of a token.
        bonus: the target's own token after the accepted path.
    """
    tokens, parents, path = one.tokens[row], one.parents[row], one.paths[row]
    scores = None if one.scores is None else one.scores[row]
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if parent >= 0:
            children.setdefault(parent, []).append(node)
    taken = set(path)
    places = _places(children, taken, path[-1])
    deepest = max(column for column, _ in places.values())
    height = _TOP + _ROW * (1 + max(line for _, line in places.values())) + 6
    picture = Drawing(title, _COLUMN * (deepest + 1) + 20, height)
    for node, (column, line) in places.items():
        if node == _BONUS_NODE:
            parent, color, text, about = path[-1], BONUS, label(bonus), "the target's own token"
        else:
            parent = parents[node]
            color = ROOT if node == 0 else ACCEPTED if node in taken else LEFT
            text = label(tokens[node])
            about = "already written" if node == 0 else "accepted" if node in taken else "not taken"
        x, y = 10 + _COLUMN * column, _TOP + _ROW * line
        if parent >= 0:
            from_x, from_line = places[parent]
            start = (10 + _COLUMN * from_x + _BOX, _TOP + _ROW * from_line + 9)
            picture.line([start, (x - 8, start[1]), (x - 8, y + 9), (x, y + 9)], "#888")
        picture.box(x, y, _BOX, 18, color, f"{text}: {about}")
        chance = f" {exp(scores[node]):.0%}" if scores is not None and node > 0 else ""
        picture.text(x + 4, y + 13, f"{text}{chance}")
    return str(picture)


_BONUS_NODE = -1


def _places(children: dict[int, list[int]], taken: set[int], end: int) -> dict[int, tuple[int, int]]:
    """Column and line of every node: the accepted path, up to `end`, runs straight; what was not taken hangs below."""
    places: dict[int, tuple[int, int]] = {}
    lines = 0
    waiting = [(0, 0, False)]
    while waiting:
        node, column, below = waiting.pop()
        lines += below
        places[node] = (column, lines)
        after = sorted(children.get(node, []), key=lambda child: (child not in taken, child))
        if node == end:
            after = [_BONUS_NODE, *after]
        # The first goes on in this line, and all after it come before the second.
        waiting += [(child, column + 1, place > 0) for place, child in reversed(list(enumerate(after)))]
    return places
