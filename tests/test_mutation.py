"""The lists of `mutation.py` name what is there: modules, the text of each listed bug, the tests that guard it."""

from __future__ import annotations

import tomllib

import pytest
from mutation import LISTED, ROOMS, ROOT, run_listed

BUGS = tomllib.loads(LISTED.read_text(encoding="utf8"))["mutant"]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["name"])
def test_a_listed_bug_can_be_put_in(bug: dict[str, object]) -> None:
    file = ROOT / str(bug["file"])
    assert file.read_text(encoding="utf8").count(str(bug["old"])) == 1
    assert bug["old"] != bug["new"]


def test_names_are_given_once() -> None:
    names = [bug["name"] for bug in BUGS]
    assert len(names) == len(set(names)) >= 44


def test_unknown_bugs_are_named() -> None:
    with pytest.raises(SystemExit, match="has no nobody's"):
        run_listed(["nobody's"])


def test_the_tests_that_are_named_exist() -> None:
    for named in [test for bug in BUGS for test in bug["tests"]] + [test for tests in ROOMS.values() for test in tests]:
        file, _, function = named.partition("::")
        assert f"def {function.partition('[')[0]}" in (ROOT / "tests" / file).read_text(encoding="utf8"), named


def test_modules_exist() -> None:
    assert [module for module in ROOMS if not (ROOT / "hf_dart" / module).exists()] == []
