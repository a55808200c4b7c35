"""The numbers of a call, as HTML for a page or a notebook."""

from __future__ import annotations

from html import escape

from hf_dart.view.records import Figures
from hf_dart.view.svg import COLORS, Drawing

_WIDTH, _ROW, _LEFT = 640, 20, 90
_COLUMN, _HEIGHT, _MOST = 9, 150, 400  # of the timeline: pixels of a round, of the drawing; rounds shown


def summary(stats: Figures) -> str:
    """A table of what the drafts did, the depths they reached, and the time by phase."""
    numbers = {
        "tokens per target forward (τ)": f"{stats.tau:.2f}",
        "rounds": f"{stats.rounds}, {stats.plain_rounds} of them without a draft",
        "tokens in rounds": str(stats.tokens),
        "drafted tokens verified": f"{stats.drafted}, {stats.acceptance_rate:.0%} accepted",
    }
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in numbers.items())
    parts = [f"<table>{rows}</table>", _depths(stats), _phases(stats)]
    if stats.trace is not None:
        parts.append(timeline(stats))
    return "\n".join(part for part in parts if part)


def _depths(stats: Figures) -> str:
    if not any(stats.accepted_per_depth):
        return ""
    shares = [count / stats.row_rounds for count in stats.accepted_per_depth]
    picture = Drawing("How deep drafts were accepted", _WIDTH, 60 + _ROW * len(shares))
    picture.text(_LEFT - 8, 30, "depth", anchor="end")
    picture.text(_LEFT, 52 + _ROW * len(shares), "share of all rounds")
    for number, share in enumerate(shares):
        y = 36 + _ROW * number
        picture.text(_LEFT - 8, y + 12, str(number + 1), anchor="end")
        picture.box(_LEFT, y, (_WIDTH - _LEFT - 60) * share, _ROW - 6, COLORS[2], f"depth {number + 1}: {share:.0%}")
        picture.text(_LEFT + (_WIDTH - _LEFT - 60) * share + 6, y + 12, f"{share:.0%}")
    return str(picture)


def _phases(stats: Figures) -> str:
    total = sum(stats.seconds.values())
    if not total:
        return ""
    picture = Drawing(f"Time by phase: {1000 * total:.0f} ms in all", _WIDTH, 60 + _ROW * len(stats.seconds))
    picture.text(_LEFT - 8, 30, "phase", anchor="end")
    picture.text(_LEFT, 52 + _ROW * len(stats.seconds), "milliseconds, and share of the whole")
    for number, (name, seconds) in enumerate(stats.seconds.items()):
        y, share = 36 + _ROW * number, seconds / total
        picture.text(_LEFT - 8, y + 12, name, anchor="end")
        width = (_WIDTH - _LEFT - 130) * share
        picture.box(_LEFT, y, width, _ROW - 6, COLORS[number % len(COLORS)], f"{name}: {1000 * seconds:.1f} ms")
        picture.text(_LEFT + width + 6, y + 12, f"{1000 * seconds:.1f} ms, {share:.0%}")
    return str(picture)


def timeline(stats: Figures) -> str:
    """A column per round, as high as it took long, its phases stacked; the first `_MOST` rounds."""
    assert stats.trace is not None
    rounds = stats.trace.rounds[:_MOST]
    if not rounds:
        return ""
    totals = [sum(one.seconds.values()) for one in rounds]
    # One slow round, such as the first, must not flatten the others.
    longest = max(sorted(totals)[int(0.98 * (len(totals) - 1))], 1e-9)
    width = max(_WIDTH, 60 + _COLUMN * len(rounds))
    picture = Drawing("Milliseconds of each round, by phase", width, _HEIGHT + 80)
    bottom = _HEIGHT + 30
    picture.text(44, 24, "ms", anchor="end")
    picture.text(44, 40, f"{1000 * longest:.1f}", anchor="end")
    picture.text(44, bottom, "0", anchor="end")
    picture.text(44, bottom + 14, "round", anchor="end")
    for number in range(0, len(rounds), 10):
        picture.text(50 + _COLUMN * number, bottom + 14, str(number + 1))
    places = {name: place for place, name in enumerate(stats.seconds)}
    for number, one in enumerate(rounds):
        x, y = 50 + _COLUMN * number, float(bottom)
        for name, seconds in one.seconds.items():
            height = min(_HEIGHT * seconds / longest, y - 28)
            y -= height
            color = COLORS[places[name] % len(COLORS)]
            picture.box(x, y, _COLUMN - 2, height, color, f"round {number + 1}: {name} {1000 * seconds:.2f} ms")
    for number, name in enumerate(name for name in stats.seconds if name != "prefill"):
        x = 50 + 90 * number
        picture.box(x, bottom + 26, 12, 12, COLORS[places[name] % len(COLORS)], name)
        picture.text(x + 18, bottom + 36, name)
    return str(picture)
