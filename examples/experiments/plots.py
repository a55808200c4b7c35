"""Plots of what was measured, as SVG without anything to load: figures for a README, a card, a notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drawing import COLORS, INK, Drawing

from hf_dart.hub.tables import STOCK, labels

_WIDTH, _BARS, _RIGHT, _ROW, _TOP, _BOTTOM = 760, 420, 60, 22, 40, 46
_LETTER = 7  # pixels, about
_HEIGHT = 340
_SERIES = 8  # of one chart, as many as there are colours


def plots(report: dict[str, Any]) -> dict[str, str]:
    """The SVGs of what `report.as_json` gives, by name; those without data are left out."""
    rows = [(one, _name(one, case)) for one, case in zip(report["results"], labels(report), strict=True)]
    drafted = [(one, name) for one, name in rows if "tau" in one]
    found = {"speed": speed([(one, name) for one, name in rows if one["method"] != STOCK])}
    if drafted:
        found |= {
            "depth": depth([(one, name) for one, name in drafted if one["batch"] == 1] or drafted),
            "phases": phases(drafted),
            "speed_by_tau": speed_by_tau(drafted),
        }
    return found


def speed(rows: list[tuple[dict[str, Any], str]]) -> str:
    """Bars of the median ratio to stock, with the least and the largest one."""
    most = max([1.0, *(one["ratio"]["max"] for one, _ in rows)])
    left = _left(rows)
    picture = Drawing("Speed, stock = 1", left + _BARS + _RIGHT, _TOP + _ROW * len(rows) + _BOTTOM)
    colors = _colors(one["method"] for one, _ in rows)
    scale = _BARS / most
    for number, (one, name) in enumerate(rows):
        y, ratio = _TOP + _ROW * number, one["ratio"]
        picture.text(left - 8, y + 13, name, anchor="end")
        about = f"{name}: {ratio['median']:.2f} [{ratio['min']:.2f}, {ratio['max']:.2f}]"
        picture.box(left, y + 3, scale * ratio["median"], _ROW - 8, colors[one["method"]], about)
        middle = y + 3 + (_ROW - 8) / 2
        picture.line([(left + scale * ratio["min"], middle), (left + scale * ratio["max"], middle)], INK)
        picture.text(left + scale * ratio["max"] + 6, y + 13, f"{ratio['median']:.2f}")
    end = _TOP + _ROW * len(rows)
    picture.line([(left + scale, _TOP - 4), (left + scale, end + 4)])
    picture.text(left + scale, end + 18, "stock", anchor="middle")
    for times in range(2, int(most) + 1):
        picture.line([(left + scale * times, end), (left + scale * times, end + 4)])
        picture.text(left + scale * times, end + 18, f"{times} x", anchor="middle")
    picture.text(left, end + 34, "tokens per second over stock's: the median, and from the least to the largest")
    return str(picture)


def depth(rows: list[tuple[dict[str, Any], str]]) -> str:
    """Lines of how many rounds had at least so many drafted tokens accepted; τ is 1 and the area below."""
    deepest = max(len(one["accepted_per_depth"]) for one, _ in rows) or 1
    left, right = 60, _WIDTH - 30

    def draw(picture: Drawing, top: float, part: list[tuple[dict[str, Any], str]]) -> None:
        bottom = top + _HEIGHT - 100
        for share in (0, 25, 50, 75, 100):
            y = bottom - (bottom - top) * share / 100
            picture.line([(left, y), (right, y)], "#ddd")
            picture.text(left - 6, y + 4, f"{share} %", anchor="end")
        step = (right - left) / max(deepest - 1, 1)
        for place in range(0, deepest, max(1, deepest // 12)):
            picture.text(left + step * place, bottom + 18, str(place + 1), anchor="middle")
        picture.text(8, top - 12, "share of rounds")
        picture.text(right, bottom + 36, "accepted depth, in tokens", anchor="end")
        for number, (one, name) in enumerate(part):
            shares = [count / one.get("row_rounds", one["rounds"]) for count in one["accepted_per_depth"]]
            points = [(left + step * place, bottom - (bottom - top) * share) for place, share in enumerate(shares)]
            picture.line(points, COLORS[number], 2)
            for (x, y), share in zip(points, shares, strict=True):
                picture.dot(x, y, COLORS[number], f"{name}: {share:.0%}")
            _key(picture, bottom, number, f"{name}: τ {one['tau']:.2f}")

    return _charts("Share of rounds by accepted depth", rows, draw)


def phases(rows: list[tuple[dict[str, Any], str]]) -> str:
    """Stacked bars of the milliseconds of a round."""
    names = list(rows[0][0]["round_ms"])
    totals = [sum(one["round_ms"].values()) for one, _ in rows]
    left = _left(rows)
    picture = Drawing("Milliseconds per round", left + _BARS + _RIGHT, _TOP + _ROW * len(rows) + _BOTTOM)
    scale = _BARS / max(totals)
    for number, ((one, name), total) in enumerate(zip(rows, totals, strict=True)):
        y, x = _TOP + _ROW * number, float(left)
        picture.text(left - 8, y + 13, name, anchor="end")
        for place, phase in enumerate(names):
            spent = one["round_ms"][phase]
            about = f"{name}: {phase} {spent:.2f} ms"
            picture.box(x, y + 3, scale * spent, _ROW - 8, COLORS[place % len(COLORS)], about)
            x += max(scale * spent, 0)
        picture.text(x + 6, y + 13, f"{total:.1f}")
    y = _TOP + _ROW * len(rows) + 36
    picture.text(left, y - 20, "milliseconds of a round, by phase")
    for place, phase in enumerate(names):
        picture.box(20 + 100 * place, y - 10, 12, 12, COLORS[place % len(COLORS)], phase)
        picture.text(38 + 100 * place, y, phase)
    return str(picture)


def speed_by_tau(rows: list[tuple[dict[str, Any], str]]) -> str:
    """A point per row: what τ it has, and what it makes of that in speed."""
    left, right = 60, _WIDTH - 40
    most_tau = max(1.0, *(one["tau"] for one, _ in rows)) * 1.05
    most_ratio = max(1.0, *(one["ratio"]["median"] for one, _ in rows)) * 1.05

    def draw(picture: Drawing, top: float, part: list[tuple[dict[str, Any], str]]) -> None:
        bottom = top + _HEIGHT - 100
        picture.line([(left, top), (left, bottom), (right, bottom)])
        for tau in range(1, int(most_tau) + 1):
            picture.text(left + (right - left) * tau / most_tau, bottom + 16, str(tau), anchor="middle")
        for ratio in range(1, int(most_ratio) + 1):
            y = bottom - (bottom - top) * ratio / most_ratio
            picture.line([(left, y), (right, y)], "#ddd")
            picture.text(left - 6, y + 4, str(ratio), anchor="end")
        picture.text(8, top - 12, "speed over stock")
        picture.text(right, bottom + 36, "τ, tokens per forward pass of the target", anchor="end")
        for number, (one, name) in enumerate(part):
            x = left + (right - left) * one["tau"] / most_tau
            y = bottom - (bottom - top) * one["ratio"]["median"] / most_ratio
            about = f"{name}: τ {one['tau']:.2f}, {one['ratio']['median']:.2f} x stock"
            picture.dot(x, y, COLORS[number], about)
            _key(picture, bottom, number, about)

    return _charts("Speed over stock, by τ", rows, draw)


def _charts(
    title: str,
    rows: list[tuple[dict[str, Any], str]],
    draw: Callable[[Drawing, float, list[tuple[dict[str, Any], str]]], None],
) -> str:
    """One chart for up to `_SERIES` rows; for more, one for each method, below each other.

    Args:
        draw: puts a chart of such rows into the picture; `top` is where its axes begin.
    """
    groups = [rows]
    if len(rows) > _SERIES:
        methods = dict.fromkeys(one["method"] for one, _ in rows)
        groups = [[row for row in rows if row[0]["method"] == method] for method in methods]
    parts = [part[start : start + _SERIES] for part in groups for start in range(0, len(part), _SERIES)]
    picture = Drawing(title, _WIDTH, sum(_HEIGHT + _ROW * len(part) for part in parts))
    top = 0.0
    for part in parts:
        draw(picture, top + 60, part)
        top += _HEIGHT + _ROW * len(part)
    return str(picture)


def _key(picture: Drawing, bottom: float, number: int, words: str) -> None:
    """The line below a chart, whose axes end at `bottom`, that says what its colour of that number is."""
    y = bottom + 58 + _ROW * number
    picture.box(60, y - 10, 14, 12, COLORS[number], words)
    picture.text(80, y, words)


def _name(one: dict[str, Any], case: str) -> str:
    return ", ".join(filter(None, [one["method"], case, one["mode"], f"batch {one['batch']}"]))


def _left(rows: list[tuple[dict[str, Any], str]]) -> int:
    """Where bars begin: after the longest name."""
    return max(200, 16 + _LETTER * max((len(name) for _, name in rows), default=0))


def _colors(methods: Any) -> dict[str, str]:
    return {method: COLORS[place % len(COLORS)] for place, method in enumerate(dict.fromkeys(methods))}
