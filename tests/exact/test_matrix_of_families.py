"""The matrix of families, and the table of it that stands in the repo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.compare import tally
from support.families import REFUSED
from surveys.matrix import CELLS, COLUMNS, TESTED, run_cell


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "column"), CELLS, ids=str)
def test_cell(family: str, column: Any) -> None:
    cell = run_cell(family, column)
    assert cell.runs == 4
    total = tally("matrix of families")
    total.taus += cell.total.taus
    total.near_ties += cell.total.near_ties
    assert cell.total.mean_tau > 1.3


def test_the_table_is_of_these_families() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (Path(__file__).parents[1] / "MATRIX.md").read_text().splitlines()
        if line.startswith("|")
    ]
    width = len(COLUMNS) + 3
    named = {row[0] for row in rows if len(row) == width and "/" in row[2]}
    assert named == set(TESTED)
    assert {row[0] for row in rows if len(row) == 2} >= set(REFUSED)
