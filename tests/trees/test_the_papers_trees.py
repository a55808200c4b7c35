"""`TreeConfig.paper()` grows the trees that DART's own search grew, of drafts of the packaged head.

`examples/experiments/surveys/dart_search.py` recorded them, and compares many more where DART's code is at hand. In
every other case the text is likely to end at each depth: nothing grows after the end there, and nothing here.
"""

from __future__ import annotations

from pathlib import Path

from surveys.dart_search import NODES, Cases, trees

RECORDED = Path(__file__).parent / "dart_search.safetensors"


def test_the_trees_are_those_of_darts_own_search(tmp_path: Path) -> None:
    cases, wanted = Cases.load(RECORDED)
    assert trees(cases, tmp_path) == wanted
    assert all(len(tree) == NODES for tree in wanted)
    ends = [sum(cases.end in path for path in tree) for tree in wanted]
    assert len(wanted) == 16
    assert sum(count > 1 for count in ends) >= 8
    assert max(len(path) for tree in wanted for path in tree) > 5
