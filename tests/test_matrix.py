"""The matrix of families: `python tests/matrix.py` prints its table."""

from __future__ import annotations

from typing import Any

import pytest
from compare import tally
from matrix import CELLS, run_cell


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "column"), CELLS, ids=str)
def test_cell(family: str, column: Any) -> None:
    cell = run_cell(family, column)
    assert cell.runs == 4
    total = tally("matrix of families")
    total.taus += cell.total.taus
    total.near_ties += cell.total.near_ties
    assert cell.total.mean_tau > 1.3
