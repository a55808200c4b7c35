"""Rows that have ended leave: rounds of fewer rows go on with the others, and write the same."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.compare import assert_identical, tally
from support.engines import counting
from support.engines import engine as uncaptured
from support.families import PAD, needs_running_states
from support.tiny import prompts, tiny_head, tiny_target
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList

from hf_dart import TreeConfig
from hf_dart.decoding.rows import Rows, Streaming
from hf_dart.decoding.stats import DraftStats
from hf_dart.engine import engine as module
from hf_dart.engine.budget import batch_sizes
from hf_dart.engine.engine import Engine
from hf_dart.engine.loop import _take
from hf_dart.engine.tier import Tier

pytestmark = pytest.mark.filterwarnings("error::UserWarning")
ENDED = tally("float64, rounds of fewer rows")
GREEDY = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": [3, 11, 19, 27], "pad_token_id": 0}
TREE = TreeConfig(nodes=6, lookup=0)
ROWS = prompts([9, 3, 7, 13, 5], seed=2)


@pytest.fixture(autouse=True)
def every_move_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORTH_A_MOVE", 1)


engine = functools.partial(uncaptured, lag=1)


def batches(made: Engine) -> list[int]:
    """Of the tiers, each once, in the order in which they were used last."""
    return list(dict.fromkeys(tier.shape.batch for tier in made.tiers if tier is not None))


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


@pytest.mark.parametrize("family", ["llama", pytest.param("lfm2", marks=needs_running_states)])
def test_what_seats_hold_is_their_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's own: into a tier its text, the tokens in it and its running states; out of it features and counts.

    The head has yet to take in what comes out; of ended rows that is nothing.
    """
    load, unload, seats, right = Tier.load, Tier.unload, [], []

    def loaded(self: Tier, job: Any) -> None:
        load(self, job)
        for seat, row in enumerate(self.seats):
            text, seen = job.rows.tokens[row], self.state.seen[seat].nonzero().flatten().tolist()
            right.append(int(self.state.roots[seat]) == text[-1])
            right.append({*seen} - {PAD} == {*text} - {PAD})  # padding counts in older releases
        held = self.cache.states.committed if self.cache.states is not None else {}
        for slot, states in held.items():
            right.append(torch.equal(states, job.cache.states.committed[slot][self.seats]))
        seats.append(self.seats)

    def unloaded(self: Tier, job: Any) -> None:
        unload(self, job)
        features, counts = job.session.seen.features, job.session.seen.counts
        held = dict(zip(self.seats, zip(self.state.features, self.state.counts.tolist(), strict=True), strict=True))
        for row, count in enumerate(counts.tolist()):
            taken, wanted = held.get(row, (torch.zeros_like(features[row]), 0))
            assert count == wanted
            assert torch.equal(features[row, :count], taken[:count])

    monkeypatch.setattr(Tier, "load", loaded)
    monkeypatch.setattr(Tier, "unload", unloaded)
    target = tiny_target(family)
    head = tiny_head(target)
    engine(target, head)
    for _ in range(2):
        assert_identical(target, head, ROWS, tree_config=TREE, **GREEDY, repetition_penalty=1.2)
    assert all(right)
    assert any(rows != [*range(len(rows))] for rows in seats)


def test_what_is_left_is_shared_by_fewer() -> None:
    """Each row gets more nodes then. A first call makes no rounds that it can go without."""
    target = tiny_target("qwen3")
    head = tiny_head(target)
    made = engine(target, head, first_tier=64)
    shares = []
    for _ in range(2):
        assert_identical(target, head, ROWS, tree_config=TreeConfig(lookup=0, node_cost=0), **GREEDY)
        tiers = [tier for tier in made.tiers if tier is not None]
        shares.append({tier.shape.batch: tier.shape.drafted for tier in tiers})
    assert shares[0] == {5: 12}
    assert len(shares[1]) > 1
    assert all(64 // batch <= share for batch, share in shares[1].items())


def test_a_long_row_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says has no room in the tier of the short one, and is not looked at for copies."""
    monkeypatch.setattr(module, "_WORTH_A_MOVE", 64)  # the call stays in that tier
    target = tiny_target("llama")
    head = tiny_head(target)
    made = engine(target, head)
    inputs = prompts([60, 5])
    options = {"tree_config": TreeConfig(nodes=8), "do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    target.generate(**prompts([5, 5], seed=3), assistant=head, **options)
    first, other = target.generate(**inputs, do_sample=False, max_new_tokens=1)[:, -1].tolist()
    assert first != other
    assert_identical(target, head, inputs, eos_token_id=[first], into=ENDED, **options)
    assert batches(made) == [2]


COUNTING = {"do_sample": False, "max_new_tokens": 28, "eos_token_id": [130], "pad_token_id": 0}


def test_a_path_that_is_longer_than_trees_of_one_row() -> None:
    """Of 12 nodes of two rows one may have 8 in a row; by itself it has no more than 6."""
    target, head, inputs = counting(8.0)
    made = engine(target, head, first_tier=64, lag=0)
    for rows in (slice(1, 2), slice(2), slice(2)):
        some = {name: part[rows] for name, part in inputs.items()}
        assert_identical(target, head, some, tree_config=TREE, **COUNTING)
    assert max(max(counts) for counts in head.last_stats.committed) == 8
    assert batches(made) == [1, 2]


@pytest.mark.parametrize("lag", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_rounds_under_way_are_read_first(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is time to leave, it still is when they have been."""
    target, head, inputs = counting(4.0)
    engine(target, head, first_tier=64, lag=lag)
    used: list[int] = []
    run_in = module.run
    monkeypatch.setattr(module, "run", lambda tier, *more: (used.append(tier.shape.batch), run_in(tier, *more))[1])
    for _ in range(2):
        target.generate(**inputs, assistant=head, tree_config=TreeConfig(nodes=8, lookup=0), **COUNTING)
    assert used == [2, 2, 1]


def test_rows_that_wait_take_no_part_in_a_round() -> None:
    """Nor do those that have ended: acceptance is counted over the others."""
    config = GenerationConfig(max_length=30)
    config._pad_token_tensor = torch.tensor(0)
    criteria = StoppingCriteriaList([MaxLengthCriteria(30), EosTokenCriteria(3)])
    rows, stats = Rows(torch.ones(3, 4, dtype=torch.long), None, config, criteria, False), DraftStats()
    for emitted in ([[5, 6, 7], [8], [9, 3]], [[], [5, 6], []]):
        _take(emitted, rows, Streaming(None, rows), stats, 8)
    assert rows.emitted == [3, 3, 2]
    assert (stats.rounds, stats.row_rounds, stats.tokens, stats.drafted) == (2, 4, 8, 4 * 7)
    assert stats.accepted_per_depth == [3, 1]


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
    tier = next(tier for tier in made.tiers if tier is not None and tier.shape.batch < 5)
    launched = []

    def fails(tree: Any) -> Any:
        launched.append(1)
        if len(launched) == 2:
            raise torch.OutOfMemoryError("no room left")
        return type(tier.round).verify(tier.round, tree)

    monkeypatch.setattr(tier.round, "verify", fails)
    with pytest.warns(UserWarning, match=r"it failed \(OutOfMemoryError: no room left\)"):
        assert_identical(target, head, ROWS, **options)
    assert len(launched) == 2
    assert_identical(target, head, ROWS, **options)
