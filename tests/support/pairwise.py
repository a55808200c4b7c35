"""A covering array: few cases in which every two levels of every two factors meet."""

from __future__ import annotations

from itertools import combinations
from random import Random

_TRIED = 24


def pairwise(factors: dict[str, list[str]], seed: int = 0) -> list[dict[str, str]]:
    """Cases (factor -> level) that hold every pair of levels of two factors at least once; the same every time."""
    random = Random(seed)
    names = list(factors)
    missing = {
        ((one, level), (two, other))
        for one, two in combinations(names, 2)
        for level in factors[one]
        for other in factors[two]
    }
    cases = []
    while missing:
        # Built around a pair that is still missing, so that every case adds one; of some tries, the best.
        wanted = min(missing)
        tries = [
            {**{name: random.choice(levels) for name, levels in factors.items()}, **dict(wanted)} for _ in range(_TRIED)
        ]
        best = max(tries, key=lambda case: len(missing.intersection(_pairs(case, names))))
        missing.difference_update(_pairs(best, names))
        cases.append(best)
    return cases


def _pairs(case: dict[str, str], names: list[str]) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    return [((one, case[one]), (two, case[two])) for one, two in combinations(names, 2)]
