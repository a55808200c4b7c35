"""Tables of measurements, in Markdown and on a terminal."""

from __future__ import annotations

from hf_dart.hub.tables import aligned, markdown


def test_columns_are_aligned() -> None:
    text = "\n".join(["Some `words` here.", "", *markdown(["name", "ms"], [["a b", "1.50"], ["**c**", "12.25"]])])
    assert aligned(text).splitlines() == ["Some words here.", "", "name  ms", "---   ---", "a b   1.50", "c     12.25"]
