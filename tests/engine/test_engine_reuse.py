"""What passes between calls that use the same tiers, and between rounds in a tier and out of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.caches import prefill
from support.cases import batch
from support.compare import assert_identical
from support.engines import at_two_speeds, counting, engine
from support.tiny import prompts, tiny_head, tiny_target
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from hf_dart import TreeConfig
from hf_dart.cache.ragged import RaggedCache
from hf_dart.decoding.noise import MAX_LEAD
from hf_dart.decoding.session import Session
from hf_dart.drafters.state import SlotState
from hf_dart.engine import processing
from hf_dart.engine.graphs import Launch
from hf_dart.engine.loop import Reports
from hf_dart.engine.state import Shape

TREE = TreeConfig(nodes=13)
GREEDY = {"do_sample": False, "max_new_tokens": 24, "tree_config": TREE, "pad_token_id": 0}
SAMPLED = {**GREEDY, "do_sample": True, "top_k": 0}


@pytest.fixture(scope="module")
def qwen() -> tuple[Any, Any]:
    target = tiny_target("qwen3")
    return target, tiny_head(target)


@pytest.fixture
def pair(qwen: tuple[Any, Any]) -> Iterator[tuple[Any, Any]]:
    yield qwen
    qwen[1].engine = None


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    "changes",
    [
        [{"repetition_penalty": 1.2}, {"repetition_penalty": 5.0}, {}],
        [{"temperature": 0.3}, {"temperature": 2.5}, {}],
        [{"top_p": 0.3}, {"top_p": 0.95}, {"min_p": 0.2}, {"min_p": 0.01}],
        [{"suppress_tokens": [25, 47]}, {"suppress_tokens": [4, 27]}, {}],
        [{"eos_token_id": list(range(2, 26))}, {"eos_token_id": [40, 41, 42, 43]}, {}],
        [{"eos_token_id": [25, 27], "min_new_tokens": 9}, {"eos_token_id": [27, 47], "min_new_tokens": 4}],
    ],
    ids=lambda changes: "-".join(changes[0]),
)
def test_calls_that_differ_in_one_thing(pair: tuple[Any, Any], changes: list[dict[str, Any]]) -> None:
    """One engine for all of them: what one call asked for is nothing to the next."""
    target, head = pair
    engine(target, head, first_tier=64)
    options = SAMPLED if {"temperature", "top_p", "eos_token_id"} & {*changes[0]} else GREEDY
    texts = [assert_identical(target, head, batch(4, "sdpa"), **options, **change)[0].sequences for change in changes]
    assert not any(torch.equal(*two) for two in pairwise(texts)), "it was to matter"


@pytest.mark.filterwarnings("error::UserWarning")
def test_what_another_call_left_is_not_read() -> None:
    """Not even through a mask: a text of which target and head make NaN stood in the slots of the next one."""
    target = tiny_target("gpt2")
    head = tiny_head(target)
    made = engine(target, head, first_tier=64)
    with torch.no_grad():
        target.transformer.wpe.weight[30:] = torch.nan
    assert_identical(target, head, prompts([4]), **GREEDY)
    target.generate(**prompts([20]), assistant=head, **GREEDY)
    (tier,) = made.tiers
    assert tier is not None
    held = [part.store.buffer(0) for part in (tier.cache, tier.draft)]
    assert all(buffer.isnan().any() for buffer in held)
    assert_identical(target, head, prompts([4]), **GREEDY)
    assert not any(buffer.isnan().any() for buffer in held)


@pytest.mark.parametrize("ignored", [(0, 7), (7, 0)])
def test_two_penalties_are_not_one(pair: tuple[Any, Any], ignored: tuple[int, int]) -> None:
    """Each counts another part of the text; there is but one record of the tokens in it."""
    target, head = pair
    engine(target, head, first_tier=64)
    two = LogitsProcessorList(
        RepetitionPenaltyLogitsProcessor(penalty, prompt_ignore_length=start)
        for penalty, start in zip((1.5, 3.0), ignored, strict=True)
    )
    assert processing.key(two, 7) is None
    with pytest.warns(UserWarning, match="it has logits processors"):
        assert_identical(target, head, prompts([7]), logits_processor=two, **GREEDY)


@pytest.mark.parametrize(("options", "lag"), [(GREEDY, 0), (SAMPLED, 2)], ids=["greedy", "sampled"])
def test_the_same_drafts_whatever_the_tiers(pair: tuple[Any, Any], options: dict[str, Any], lag: int) -> None:
    """Of one row, the eager round's: the head has read as much, and seen the same noise, from tier to tier."""
    target, head = pair
    options = {**options, "max_new_tokens": 40, "tree_config": TreeConfig(nodes=13, lookup=0)}
    committed = []
    for first_tier in (None, 16, 128):
        head.engine = None
        if first_tier is not None:
            engine(target, head, first_tier=first_tier, lag=lag)
        assert_identical(target, head, prompts([7]), **options)
        # Rounds that were under way when the text ended change nothing.
        committed.append([counts for counts in head.last_stats.committed if counts != [0]])
    assert committed[0] == committed[1] == committed[2]


AT_TWO_SPEEDS = {
    "do_sample": True,
    "top_k": 0,
    "temperature": 0.1,
    "max_new_tokens": 90,
    "tree_config": TreeConfig.chain(7),
}


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("lag", [1, 2])
def test_rows_that_wait_lose_nothing(lag: int) -> None:
    """A row far ahead comes into another tier, whose first rounds have no more noise for it.

    What it had accepted before is still taken in by the head, which has read all that the target has but for that.
    """
    target, head, inputs = at_two_speeds()
    made = engine(target, head, first_tier=64, lag=lag)
    assert_identical(target, head, inputs, **AT_TWO_SPEEDS)
    ahead = [counts[0] for counts in head.last_stats.committed]
    ahead = ahead[: -[count > 0 for count in reversed(ahead)].index(True)]  # up to the end of its text
    assert ahead.count(0) == lag
    assert ahead[-4:] == [8, 8, 8, 4]
    tier = made.tiers[-1]
    assert tier is not None
    assert torch.equal(tier.draft.lengths + tier.state.counts, tier.cache.lengths)


def test_rows_far_ahead_go_on_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured rounds let them come farther than eager rounds do, which go on where one could not be launched."""
    target, head, inputs = at_two_speeds()
    engine(target, head, first_tier=256)
    launch, limits, launched, asked = Launch.__call__, Session.limits, [], []

    def fails(self: Launch) -> None:
        launched.append(None)
        if len(launched) == 9:
            raise RuntimeError("broken")
        launch(self)

    def watched(self: Session) -> list[int]:
        found = limits(self)
        if launched:
            asked.append((found, list(self.rows.emitted)))
        return found

    monkeypatch.setattr(Launch, "__call__", fails)
    monkeypatch.setattr(Session, "limits", watched)
    with pytest.warns(UserWarning, match="it failed"):
        assert_identical(target, head, inputs, **AT_TWO_SPEEDS)
    leads = [emitted[0] - emitted[1] for _, emitted in asked]
    assert max(leads) == leads[0] > MAX_LEAD
    assert all(limit > 0 for those, emitted in asked for limit, done in zip(those, emitted, strict=True) if done < 90)


def test_no_text_stands_where_trees_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last slots of a tier are those of the nodes, however long the paths that are accepted."""
    target, head, inputs = counting(8.0)
    send, held = Reports.send, []

    def watched(self: Reports, number: int) -> None:
        send(self, number)
        for tier in made.tiers:
            assert tier is not None
            held.append(tier.shape.slots - int(tier.cache.lengths.max()))

    monkeypatch.setattr(Reports, "send", watched)
    for start in (0, 3):
        made = engine(target, head, lag=1)
        some = {name: part[1:, start:] for name, part in inputs.items()}
        options = {"do_sample": False, "max_new_tokens": 30, "tree_config": TreeConfig(nodes=8, lookup=0)}
        assert_identical(target, head, some, **options)
    assert max(held) > 0 == min(held)


@pytest.mark.parametrize("depth", [1, 5, 12])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_noise_is_there_for_all_that_may_be_asked(batch_size: int, depth: int) -> None:
    """By rows that are as far ahead as they may be or, in rounds under way, as they can be; and by their trees."""
    shape = Shape(batch_size, 64, TreeConfig(nodes=20), 48, depth, sampled=True)
    under_way = 3 * shape.path  # lag of 2, and the one that is launched
    assert shape.noise_rows >= max(under_way, MAX_LEAD if batch_size > 1 else 0) + depth + 1
    assert Shape(batch_size, 64, TreeConfig(nodes=20), 48, depth).noise_rows == 0


def test_seats_go_back_to_their_rows() -> None:
    """Two rows are taken in by rows 0 and 2 of three, in the head's cache as in the target's; row 1 is as it was."""
    prefilled = prefill(tiny_target("llama"), prompts([4, 4, 4]))
    cache = RaggedCache(prefilled, [0, 0, 0], 8, keep=True)
    draft = SlotState.begin(cache.store.specs[0], len(cache.store.specs), 3, 8)
    draft.advance(torch.tensor([4, 4, 4]))
    draft.store.copy_from(cache.store, 4)
    before = cache.store.buffer(0).clone()
    seats = SlotState.begin(cache.store.specs[0], len(cache.store.specs), 2, 8)
    seats.advance(torch.tensor([2, 6]))
    seats.store.buffer(0).copy_(torch.arange(2.0)[:, None, None, None])
    cache.take_in(seats.store, seats.lengths, [0, 2])
    draft.take_in(seats, [0, 2])
    for holder in (cache, draft):
        assert holder.lengths.tolist() == [2, 4, 6]
        assert torch.equal(holder.store.buffer(0)[1, :, :4], before[1, :, :4])
        assert (holder.store.buffer(0)[0, :, :2] == 0).all()
        assert (holder.store.buffer(0)[2, :, :6] == 1).all()
    assert (cache.longest, draft.counted.tolist()) == (6, [2, 4, 6])
