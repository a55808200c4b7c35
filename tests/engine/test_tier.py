"""Rounds in a tier: what passes from call to call, between a tier and the call's own caches, and from tier to tier."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.caches import prefill
from support.cases import GREEDY, SAMPLED, batch
from support.compare import assert_identical, tally
from support.engines import compiled_pair, counting, engine
from support.families import needs_running_states
from support.tiny import prompts, tiny_head, tiny_target

from hf_dart import TreeConfig
from hf_dart.cache.target_cache import TargetCache
from hf_dart.decoding.session import Session
from hf_dart.engine.graphs import Capture, EngineConfig
from hf_dart.engine.tier import CapturedDraft, CapturedForward

pytestmark = pytest.mark.filterwarnings("error:This call runs uncompiled")
EXACT = tally("float64, rounds on fixed shapes")


def test_what_another_call_left_is_not_read() -> None:
    """Not even through a mask: a text of which target and head make NaN stood in the slots of the next one."""
    target, head, made = compiled_pair("gpt2", first_tier=64)
    with torch.no_grad():
        target.transformer.wpe.weight[30:] = torch.nan
    assert_identical(target, head, prompts([4]), **GREEDY)
    target.generate(**prompts([20]), assistant=head, **GREEDY)
    (tier,) = made.tiers
    assert tier._draft_cache is not None
    held = [part.store.buffer(0) for part in (tier._cache.entries, tier._draft_cache)]
    assert all(buffer.isnan().any() for buffer in held)
    assert_identical(target, head, prompts([4]), **GREEDY)
    assert not any(buffer.isnan().any() for buffer in held)


def test_calls_in_turns() -> None:
    """One call's rounds write over what another's left: tiers take turns in one memory."""
    target, head, made = compiled_pair("qwen3", first_tier=64)
    calls: list[tuple[int, dict[str, Any]]] = [
        (4, {**GREEDY, "tree_config": TreeConfig(nodes=13)}),
        (1, {**GREEDY, "tree_config": TreeConfig(nodes=8)}),
        (4, {**SAMPLED, "tree_config": TreeConfig(nodes=8)}),
        (4, {**GREEDY, "no_repeat_ngram_size": 3}),
        (1, {**SAMPLED, "temperature": 0.7, "tree_config": TreeConfig(nodes=1)}),
    ]
    for size, options in calls * 2:
        assert_identical(target, head, batch(size, "sdpa"), into=EXACT, **{**options, "max_new_tokens": 14})
    tiers = [tier for tier in made.tiers if tier is not None]
    assert len(tiers) > 3
    for caches in ([tier._cache.entries for tier in tiers], [tier._draft_cache for tier in tiers if tier._draft_cache]):
        assert len({cache.store.buffer(0).data_ptr() for cache in caches}) == 1


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_drafts_whatever_the_tiers(options: dict[str, Any], size: int, noted: Any) -> None:
    """The drafter has read as much, and seen the same noise, from tier to tier as without; each draft is a launch."""
    target = tiny_target("qwen3")
    head = tiny_head(target)
    options = {**options, "max_new_tokens": 40, "tree_config": TreeConfig(nodes=13, lookup=0)}
    drafts, found = noted(CapturedDraft, "__call__", lambda *_: None), []
    for first_tier in (None, 16, 128):
        drafts.clear()
        made = None if first_tier is None else engine(target, head, first_tier=first_tier)
        assert_identical(target, head, batch(size, "sdpa"), into=EXACT, **options)
        found.append(head.last_stats.committed)
        assert made is None or len(drafts) == head.last_stats.rounds
        assert first_tier != 16 or len(made.tiers) > 1
    assert found[0] == found[1] == found[2]


def test_no_text_stands_where_trees_do(noted: Any) -> None:
    """The last slots of a tier are those of the nodes, however long the paths that are accepted."""
    target, head, inputs = counting(8.0)
    caches = noted(TargetCache, "commit", lambda _, cache, *accepted: (cache.entries, cache.longest), result=True)
    for start in (0, 3):
        engine(target, head)
        some = {name: part[1:, start:] for name, part in inputs.items()}
        options = {"do_sample": False, "max_new_tokens": 30, "tree_config": TreeConfig(nodes=8, lookup=0)}
        assert_identical(target, head, some, **options)
    left = [entries.capacity - 8 - longest for entries, longest in caches if entries.fixed]
    assert max(left) > 0 == min(left)


@pytest.mark.parametrize("family", ["llama", pytest.param("lfm2", marks=needs_running_states)])
def test_seats_are_filled_by_any_rows(family: str) -> None:
    """Rows 2 and 0 of three take two seats: their lengths, entries and running states; and go back."""
    cache = TargetCache(prefill(tiny_target(family), prompts([4, 6, 5])), [2, 0, 1], 8, keep=True)
    host = torch.device("cpu")
    seats, rows = cache.as_fixed(2, 16, 8, host, Capture(EngineConfig(), host).memory_of), [2, 0]
    seats.take_rows(cache, [*enumerate(rows)])
    assert seats.lengths.tolist() == seats.entries.counted.tolist() == [5, 4]
    held, own = (part.entries.store.buffer(0) for part in (seats, cache))
    states = {} if cache.states is None else dict(cache.states.committed)
    for seat, row in enumerate(rows):
        length = int(cache.lengths[row])
        assert torch.equal(held[seat, :, :length], own[row, :, :length])
        held[seat] = row
        for slot, state in states.items():
            assert torch.equal(seats.states.committed[slot][seat], state[row])
            seats.states.committed[slot][seat] = row
    kept = own[1, :, :6].clone()
    seats.entries.advance(torch.tensor([1, 3]))
    cache.take_rows(seats, [(row, seat) for seat, row in enumerate(rows)])
    assert cache.lengths.tolist() == cache.entries.counted.tolist() == [7, 6, 6]
    assert torch.equal(own[1, :, :6], kept)
    assert all((own[row, :, : int(cache.lengths[row])] == row).all() for row in rows)
    for slot, state in states.items():
        assert torch.equal(cache.states.committed[slot][1], state[1])
        assert all((cache.states.committed[slot][row] == row).all() for row in rows)


@pytest.mark.filterwarnings("default:This call runs uncompiled")
@pytest.mark.parametrize(("size", "nodes", "how"), [(4, 8, GREEDY), (4, 8, SAMPLED), (1, 1, GREEDY)])
def test_a_forward_that_fails(size: int, nodes: int, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a text: that very round is verified by the eager forward, and later calls do not try again.

    It reads nothing of what the call before left.
    """
    target, head, made = compiled_pair("llama", first_tier=64)
    options = {**how, "no_repeat_ngram_size": 3, "tree_config": TreeConfig(nodes=nodes)}
    inputs, launches, launch = batch(size, "sdpa"), [], CapturedForward.__call__

    def fails(self: Any, *args: Any) -> Any:
        launches.append(1)
        if len(launches) == 5:
            raise torch.OutOfMemoryError("no room left")
        return launch(self, *args)

    assert_identical(target, head, inputs, **options)
    monkeypatch.setattr(CapturedForward, "__call__", fails)
    with pytest.warns(UserWarning, match=r"it failed \(OutOfMemoryError: no room left\)"):
        assert_identical(target, head, inputs, **options)
    assert len(launches) == 5
    assert made.tiers == [None]
    assert_identical(target, head, inputs, **options)


def test_forwards_by_all_rows() -> None:
    """Trees of a batch are filled up to fewer nodes than those of one row, on a CPU."""
    for size, sizes in ((1, {1, 8}), (4, {1, 4, 8})):  # 8 by the trial of a tier
        target, head, made = compiled_pair("llama", first_tier=128)
        options = {**GREEDY, "tree_config": TreeConfig(nodes=3, lookup=0)}
        assert_identical(target, head, batch(size, "sdpa"), into=EXACT, **options)
        (tier,) = made.tiers
        assert set(tier.forwards) == sizes


@pytest.mark.filterwarnings("default:This call runs uncompiled")
@pytest.mark.parametrize("fails", [True, False])
def test_drafts_that_are_not_launched(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the launch fails in the middle of a text, or there are more new positions than it has room for.

    The head looks at those drafts again with what it has taken in itself.
    """
    target = tiny_target("llama")
    head = tiny_head(target, editor=True)
    options = {**GREEDY, "tree_config": TreeConfig(nodes=8, lookup=0, refine=1)}
    assert_identical(target, head, batch(4, "sdpa"), **options)
    committed = head.last_stats.committed
    made = engine(target, head, first_tier=64)
    drafts = []
    draft = CapturedDraft.__call__

    def third(self: Any, *args: Any) -> Any:
        drafts.append(1)
        if len(drafts) == 2 and not fails:
            (tier,) = made.tiers
            tier._most = 1
        if len(drafts) == 3 and fails:
            raise torch.OutOfMemoryError("no room left")
        return draft(self, *args)

    monkeypatch.setattr(CapturedDraft, "__call__", third)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert_identical(target, head, batch(4, "sdpa"), **options)
    assert any("it failed (OutOfMemoryError" in str(one.message) for one in told) == fails
    assert head.last_stats.committed == committed
    assert all(made.tiers) != fails


def test_what_is_kept_while_drafting_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head takes in the features of every token, though each launch of a graph writes in the place of the last."""
    step, propose = CapturedForward.step, Session.propose
    taken: list[torch.Tensor] = []

    def in_place(self: Any, run: Any) -> None:
        before = getattr(self, "_found", None)
        step(self, run)
        if before is not None:
            for place, found in zip(before, self._found, strict=True):
                place.copy_(found)
            self._found = before

    def watched(self: Session, drafted: bool) -> Any:
        if len(self.pending) > 1 and drafted:
            taken.append(torch.cat([features[0, :1] for features, _, _ in self.pending]))
        return propose(self, drafted)

    monkeypatch.setattr(CapturedForward, "step", in_place)
    monkeypatch.setattr(Session, "propose", watched)
    target = tiny_target("llama")
    head = tiny_head(target, tree={"nodes": None})
    engine(target, head, first_tier=128)
    options = {"max_new_tokens": 90, "tree_config": TreeConfig(lookup=0, draft_cost=3.0)}
    assert_identical(target, head, prompts([7]), **{**GREEDY, **options})
    assert len(taken) == 1
    head.draft_window = 24  # which holds less than a pause of 256 rounds leaves unread
    assert_identical(target, head, prompts([7]), **{**GREEDY, **options, "max_new_tokens": 400})
    assert len(taken[0].unique(dim=0)) == len(taken[0]) > 40


@pytest.mark.parametrize("seed", range(2))
def test_rows_without_room_in_another_tier(seed: int) -> None:
    """A row stands at the end of the position table, and the others go on in the next tier."""
    target = tiny_target("gpt2", n_positions=32)
    head = tiny_head(target)
    engine(target, head, first_tier=32)
    tree = TreeConfig(nodes=40, depth=1, top_k=60)
    inputs = prompts([24 - seed % 2, 3, 5], seed=seed)
    assert_identical(target, head, inputs, into=EXACT, do_sample=False, max_length=33, tree_config=tree)
