"""Each row of a batch has the drafts that it would have by itself, whatever the other rows do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.compare import assert_identical
from support.tiny import prompts, tiny_eagle_drafter, tiny_head, tiny_target

from hf_dart import TreeConfig

ENDS = {"eos_token_id": [3, 11, 19, 27], "pad_token_id": 0}


@pytest.mark.parametrize(
    ("make", "lengths", "options"),
    [
        (tiny_head, [7, 7, 7], {}),
        (tiny_head, [9, 3, 7], {"prefill_chunk_size": 3, "repetition_penalty": 1.2}),
        (tiny_eagle_drafter, [3, 9, 7], ENDS),
    ],
    ids=["of one length", "padded, in chunks", "EAGLE"],
)
def test_as_much_is_accepted_as_alone(make: Callable[..., Any], lengths: list[int], options: dict[str, Any]) -> None:
    """Round by round, by rows that accept differently much and end at different times."""
    target = tiny_target("llama")
    drafter, inputs = make(target), prompts(lengths, seed=1)
    options = {"do_sample": False, "max_new_tokens": 24, "tree_config": TreeConfig(nodes=24, lookup=0), **options}
    assert_identical(target, drafter, inputs, **options)
    together = drafter.last_stats.committed
    assert drafter.last_stats.tau > 1.3
    for row, length in enumerate(lengths):
        target.generate(inputs["input_ids"][row : row + 1, -length:], assistant=drafter, **options)
        alone = [count for (count,) in drafter.last_stats.committed]
        assert [counts[row] for counts in together if counts[row]] == alone
