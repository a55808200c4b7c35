"""Pictures as SVG, with nothing to load and no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442")
"""Okabe and Ito's, which stay apart for colour-blind readers."""
PAPER, INK = "white", "black"
_LEGIBLE = 0.65  # a picture shrinks to this share of its size in a narrow window, then scrolls
# What colours of paper, words, and boxes and lines behind words become in the dark; the others do for both.
_DARK = {PAPER: "#1b1b1b", INK: "#ddd", "#9fe2c6": "#1d6b50", "#a9d3f2": "#1f5a86", "#eeeeee": "#3a3a3a"}
_DARK |= {"#999999": "#666", "#444": "#bbb", "#ddd": "#3a3a3a"}
# In every picture, so that each can stand alone; the class keeps the rules from pictures of others on a page.
_RULES = "".join(
    f'.hf-dart [fill="{one}"]{{fill:{two}}}.hf-dart [stroke="{one}"]{{stroke:{two}}}' for one, two in _DARK.items()
)
_STYLE = f"<style>@media (prefers-color-scheme:dark){{{_RULES}}}</style>"


class Drawing:
    """An SVG picture that is put together piece by piece; coordinates in pixels from the upper left."""

    def __init__(self, title: str, width: float, height: float) -> None:
        self._title, self._width, self._height = escape(title), width, height
        self._pieces: list[str] = []
        self.text(width / 2, 18, title, anchor="middle", weight="bold")

    def text(self, x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> None:
        """Words at the baseline `y`; `anchor` is start, middle or end."""
        self._pieces.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{INK}">'
            f"{escape(words)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, color: str, about: str) -> None:
        """A filled box; `about` is shown where a pointer rests on it."""
        self._pieces.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" fill="{color}">'
            f"<title>{escape(about)}</title></rect>"
        )

    def line(self, points: Sequence[tuple[float, float]], color: str = "#444", width: float = 1) -> None:
        """A line through all points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._pieces.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width:g}"/>')

    def dot(self, x: float, y: float, color: str, about: str) -> None:
        """A filled circle."""
        self._pieces.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"><title>{escape(about)}</title></circle>'
        )

    def __str__(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="hf-dart" width="{self._width:g}" '
            f'height="{self._height:g}" viewBox="0 0 {self._width:g} {self._height:g}" role="img" '
            f'style="max-width: 100%; min-width: {_LEGIBLE * self._width:.0f}px; height: auto" '
            f'font-family="sans-serif" font-size="12"><title>{self._title}</title>{_STYLE}'
            f'<rect width="100%" height="100%" fill="{PAPER}"/>{"".join(self._pieces)}</svg>\n'
        )
