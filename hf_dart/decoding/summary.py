"""The numbers of a call, as HTML for a page or a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any


def summary(stats: Any) -> str:
    """Tables of what the drafts did, the depths at which they were accepted, and the time by phase.

    Args:
        stats: a `hf_dart.decoding.stats.DraftStats`.
    """
    numbers = {
        "tokens per target forward (τ)": f"{stats.tau:.2f}",
        "rounds": f"{stats.rounds}, {stats.plain_rounds} of them without a draft",
        "tokens in rounds": str(stats.tokens),
        "drafted tokens verified": f"{stats.drafted}, {stats.acceptance_rate:.0%} accepted",
    }
    found = _table("", (f"<td>{escape(name)}</td><td>{escape(value)}</td>" for name, value in numbers.items()))
    if any(stats.accepted_per_depth):
        shares = [count / stats.row_rounds for count in stats.accepted_per_depth]
        rows = (_bar(str(depth), share, f"{share:.0%}") for depth, share in enumerate(shares, start=1))
        found += _table("Share of all rounds whose draft was accepted to each depth", rows)
    if total := sum(stats.seconds.values()):
        rows = (
            _bar(name, spent / total, f"{1000 * spent:.1f} ms, {spent / total:.0%}")
            for name, spent in stats.seconds.items()
        )
        found += _table(f"Time by phase: {1000 * total:.0f} ms in all", rows)
    return found


def _table(caption: str, rows: Iterable[str]) -> str:
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<table><caption style="text-align: left">{escape(caption)}</caption>{body}</table>\n'


def _bar(name: str, share: float, says: str) -> str:
    """Cells of a row: its name, a bar as long as its share of 1, and its value."""
    # Styled in place: a notebook takes no style sheet.
    bar = f'<div style="width: {100 * share:.1f}%; height: .8em; background: #009e73"></div>'
    return f'<td>{escape(name)}</td><td style="width: 24em">{bar}</td><td>{escape(says)}</td>'
