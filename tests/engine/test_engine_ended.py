"""Rows that have ended leave: rounds of fewer rows go on with the others, and write the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_identical, tally
from tiny import prompts, tiny_head, tiny_target

import hf_dart
from hf_dart import TreeConfig
from hf_dart.engine import compiled as module
from hf_dart.engine.budget import batch_sizes
from hf_dart.engine.compiled import Engine

pytestmark = pytest.mark.filterwarnings("error::UserWarning")
ENDED = tally("float64, rounds of fewer rows")
GREEDY = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": [3, 11, 19, 27], "pad_token_id": 0}
TREE = TreeConfig(nodes=6, lookup=0)
ROWS = prompts([9, 3, 7, 13, 5], seed=2)


@pytest.fixture(autouse=True)
def every_move_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORTH_A_MOVE", 1)


def engine(target: Any, head: Any, **options: Any) -> Engine:
    return hf_dart.compile(target, head, **{"backend": None, "first_tier": 16, "lag": 1, **options})


def batches(made: Engine) -> list[int]:
    """Of the tiers, each once, in the order in which they were used last."""
    return list(dict.fromkeys(tier.shape.batch for tier in made._tiers.values() if tier is not None))


def test_batch_sizes() -> None:
    assert [batch_sizes(running, 6) for running in range(1, 7)] == [[1, 2, 4, 6], [2, 4, 6], [4, 6], [4, 6], [6], [6]]
    assert batch_sizes(1, 1) == [1]
    assert batch_sizes(3, 8) == [4, 8]
    assert batch_sizes(8, 8) == [8]


@pytest.mark.parametrize(
    ("family", "share", "options"),
    [
        ("llama", 2, {"do_sample": True, "top_k": 0, "repetition_penalty": 1.2, "min_new_tokens": 3}),
        ("qwen3", 1, {"tree_config": TreeConfig(nodes=8, lookup=4)}),
        pytest.param("gemma3", 2, {"do_sample": True, "temperature": 0.7}, marks=pytest.mark.matrix),
        pytest.param("qwen3", 2, {"tree_config": TreeConfig(nodes=1)}, marks=pytest.mark.matrix),
    ],
    ids=["sampled", "copies", "windows", "plain"],
)
def test_ended_rows_leave(family: str, share: int, options: dict[str, Any]) -> None:
    """From tier to tier of fewer rows, in the second call that wants them."""
    target = tiny_target(family)
    head = tiny_head(target)
    made = engine(target, head, share=share)
    options = {"tree_config": TREE, **GREEDY, **options}
    used = []
    for _ in range(2):
        assert_identical(target, head, ROWS, into=ENDED, **options)
        used.append(set(batches(made)))
    assert 5 in used[0]
    assert min(used[1]) < 4
    assert used[1] <= {1, 2, 4, 5}


def test_what_is_left_is_shared_by_fewer() -> None:
    """Each row gets more nodes then. A first call makes no rounds that it can go without."""
    target = tiny_target("qwen3")
    head = tiny_head(target)
    made = engine(target, head, first_tier=64)
    shares = []
    for _ in range(2):
        assert_identical(target, head, ROWS, tree_config=TreeConfig(lookup=0), **GREEDY)
        tiers = [tier for tier in made._tiers.values() if tier is not None]
        shares.append({tier.shape.batch: tier.shape.drafted for tier in tiers})
    assert shares[0] == {5: 6}
    assert len(shares[1]) > 1
    assert all(32 // batch <= share for batch, share in shares[1].items())


def test_a_cache_that_is_handed_back_keeps_its_rows() -> None:
    target = tiny_target("qwen3")
    head = tiny_head(target)
    made = engine(target, head, first_tier=64)
    options = {"tree_config": TREE, **GREEDY}
    assert_identical(target, head, ROWS, **options)  # which would have had it leave
    stock, ours = assert_identical(target, head, ROWS, return_dict_in_generate=True, **options)
    for left, right in zip(ours.output.past_key_values.layers, stock.output.past_key_values.layers, strict=True):
        torch.testing.assert_close(left.keys, right.keys)
    assert batches(made) == [5]


@pytest.mark.parametrize("sampled", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_rounds_of_fewer_rows_that_fail(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a text: the eager round goes on, of all rows."""
    target = tiny_target("llama")
    head = tiny_head(target)
    made = engine(target, head, first_tier=64)
    options = {**GREEDY, "do_sample": sampled, "top_k": 0, "tree_config": TREE}
    for _ in range(2):
        assert_identical(target, head, ROWS, **options)
    tier = next(tier for tier in made._tiers.values() if tier is not None and tier.shape.batch < 5)
    launched = []

    def fails(tree: Any) -> Any:
        launched.append(1)
        if len(launched) == 2:
            raise torch.OutOfMemoryError("no room left")
        return type(tier.round).check(tier.round, tree)

    monkeypatch.setattr(tier.round, "_check", fails)
    with pytest.warns(UserWarning, match=r"it failed \(OutOfMemoryError: no room left\)"):
        assert_identical(target, head, ROWS, **options)
    assert len(launched) == 2
    assert_identical(target, head, ROWS, **options)
