"""Every class that transformers maps: exact, refused in a sentence of ours, or stock itself fails."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.classes import QUICK, WAYS, Report, examine
from support.small import class_names

CLASSES = class_names()
SAMPLE = random.Random(0).sample(CLASSES, 20)


def check(report: Report) -> None:
    assert not report.wrong
    assert not report.crashes
    assert report.exact or report.refused or report.stock_fails
    assert not report.exact or report.tau > 1


def test_a_sample() -> None:
    kinds = Counter()
    for name in SAMPLE:
        report = examine(name, QUICK)
        check(report)
        kinds[report.kind] += 1
    assert kinds["exact"] > len(SAMPLE) // 2, kinds


@pytest.mark.matrix
@pytest.mark.parametrize("name", CLASSES)
def test_a_class(name: str) -> None:
    check(examine(name, WAYS))
