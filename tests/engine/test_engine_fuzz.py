"""Whatever hypothesis draws, `hf_dart.compile` changes no token: captured rounds, captured forwards, eager rounds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from test_fuzz import BUDGET, calls, compare, pair

import hf_dart

TAKEN: Counter[str] = Counter()
ENGINES = st.fixed_dictionaries(
    {
        "first_tier": st.sampled_from([8, 16, 32, 64, 128]),
        "share": st.sampled_from([1, 2, 4]),
        "lag": st.integers(0, 2),
    }
)
# Processors that rounds ask the host for.
HOSTS = {
    "bad_words_ids",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "forced_eos_token_id",
    "no_repeat_ngram_size",
    "sequence_bias",
}

pytestmark = [pytest.mark.matrix, pytest.mark.filterwarnings("ignore:Of this call", "ignore:This call runs")]


@st.composite
def compiled_calls(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """One `generate` call, and how rounds are compiled for it."""
    case = draw(calls())
    case["misses"] = None  # a replay has no head
    if draw(st.booleans()):
        case["options"] = {name: value for name, value in case["options"].items() if name not in HOSTS}
    return case, draw(ENGINES)


def compare_compiled(compiled: tuple[dict[str, Any], dict[str, Any]]) -> None:
    case, options = compiled
    target, head = pair(case["family"], case["attention"], case["weights"])
    made = hf_dart.compile(target, head, backend=None, **options)
    try:
        compare(case)
    finally:
        head.engine = None  # the pair is kept for other cases
    rounds, forwards = any(made._tiers.values()), any(made._forwards.values())
    TAKEN["rounds" if rounds else "forwards" if forwards else "eager"] += 1


@pytest.mark.parametrize("part", range(1, 7))
def test_many_calls(part: int) -> None:
    """1200 cases; a part is repeated by its number."""

    @settings(BUDGET, max_examples=200)
    @seed(part)
    @given(compiled_calls())
    def any_call(compiled: tuple[dict[str, Any], dict[str, Any]]) -> None:
        compare_compiled(compiled)

    any_call()


def test_all_ways_were_taken() -> None:
    """By the cases above."""
    if not TAKEN:
        pytest.skip("no case was selected")
    assert TAKEN["rounds"] > 1
    assert TAKEN["forwards"] > 1
