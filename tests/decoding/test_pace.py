"""Pauses where drafts bring less than they cost, and measured costs: none of it changes a token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import log
from operator import sub
from random import Random
from typing import Any

import pytest
import torch
from support.compare import assert_identical
from support.tiny import prompts, tiny_target
from support.trees import chain_of

from hf_dart import DartHead, TreeConfig, attach
from hf_dart.decoding.pace import _PRIOR, Pace, PaceRecord, row_weights
from hf_dart.drafters.lookup import LookupDrafter
from hf_dart.models.stock_steps import CACHE
from hf_dart.trees.copies import NOTHING, Copies, CopyCounts, RowCopies

DEPTH = 4
LOOP = chain_of([7] * 24, -0.02)
"""What is copied in a loop; `play` lets 7s come."""


def pace_of(config: TreeConfig, batch: int = 1, device: str = "cpu", **more: Any) -> Pace:
    """The pace of a call with drafts of `DEPTH` tokens."""
    return Pace(config, device, batch, DEPTH, **more)


def play(pace: Pace, emitted: dict[bool, list[int]], nodes: int, copies: list[Copies], so_far: list[int]) -> bool:
    """Play a round that brings so many tokens per row, drafted or not, and return whether it was drafted."""
    limits = [50] * len(copies)
    drafted, _ = pace.choose(copies, row_weights(so_far, limits), [DEPTH] * len(copies))
    new = emitted[drafted]
    pace.count(drafted, [[7] * tokens for tokens in new], limits, nodes if drafted else 1, 0, {})
    so_far[:] = [before + tokens for before, tokens in zip(so_far, new, strict=True)]
    return drafted


def rounds(pace: Pace, count: int, emitted: list[int], nodes: int) -> list[bool]:
    """Play rounds that bring so many tokens where they are drafted; which of them were."""
    brings, so_far = {True: emitted, False: [min(1, tokens) for tokens in emitted]}, [0] * len(emitted)
    return [play(pace, brings, nodes, [NOTHING] * len(emitted), so_far) for _ in range(count)]


def runs(played: list[bool]) -> list[tuple[bool, int]]:
    """Whether rounds in a row were drafted, and how many."""
    return [(drafted, len(list(same))) for drafted, same in groupby(played)]


def test_drafts_that_do_not_pay_pause_longer_and_longer() -> None:
    found = runs(rounds(pace_of(TreeConfig(draft_cost=0.3, node_cost=0.0)), 1100, [1], nodes=6))
    assert [drafted for drafted, _ in found[:7:2]] == [True] * 4
    assert [count for _, count in found[:8]] == [11, 64, 6, 256, 3, 320, 3, 320]


def test_a_trial_loses_no_more_than_it_may() -> None:
    for draft, rows in ((1.0, 1), (1.0, 4), (0.5, 1), (0.5, 4), (0.1, 4)):
        found = runs(rounds(pace_of(TreeConfig(draft_cost=draft, node_cost=0.0), rows), 100, [1] * rows, nodes=1))
        for (drafted, count), loss in zip(found[:3:2], (3, 1.5), strict=True):
            assert drafted
            assert loss / rows - draft < count * draft <= loss / rows + draft + 1e-9
        assert found[1] == (False, 64)
    dear = rounds(pace_of(TreeConfig(draft_cost=9.0, node_cost=0.0)), 80, [1], nodes=1)
    assert [place for place, drafted in enumerate(dear) if drafted] == [0, 65], "even then it is tried"


def test_drafts_go_on_when_the_text_gets_easier() -> None:
    pace = pace_of(TreeConfig(draft_cost=0.3, node_cost=0.0))
    assert runs(rounds(pace, 75, [1], nodes=6)) == [(True, 11), (False, 64)]
    assert all(rounds(pace, 100, [3], nodes=6))
    assert runs(rounds(pace, 300, [1], nodes=6))[1] == (False, 64), "as short as the first pause"


def test_copies_that_suffice_are_not_drafted_beside() -> None:
    """A loop has no drafts though they would be right; where it ends, they go on at once."""
    pace = pace_of(TreeConfig(draft_cost=0.25))
    brings = {True: [3], False: [3]}
    assert all(play(pace, brings, 6, [NOTHING], [0]) for _ in range(20))
    assert not any(play(pace, {True: [20], False: [20]}, 24, [LOOP], [0]) for _ in range(100))
    assert play(pace, brings, 6, [NOTHING], [0])
    likely = pace_of(TreeConfig(draft_cost=0.5))
    copy = chain_of([7] * 24, log(0.8))
    assert not play(likely, brings, 6, [copy], [0]), "0.7 tokens, or 1.5 meanwhile"
    free = pace_of(TreeConfig(draft_cost=0.0, node_cost=0.0))
    assert play(free, brings, 6, [LOOP], [0]), "what costs nothing is always worth it"
    found = runs([play(pace, {True: [20], False: [20]}, 24, [LOOP], [0]) for _ in range(700)])
    assert found[:4] == [(False, 320), (True, 1), (False, 320), (True, 1)], "what is verified does not wait for ever"


@pytest.mark.parametrize(("token", "goes_on"), [(7, False), (8, True)])
def test_drafts_in_the_place_of_copies_that_are_right_stop(token: int, goes_on: bool) -> None:
    """What copies alone would have brought is known once the text has come; 7s come."""
    pace, copy = pace_of(TreeConfig(draft_cost=0.1, node_cost=0.01)), chain_of([token] * 4, log(0.6))
    played = [play(pace, {True: [2], False: [5]}, 6, [copy], [0]) for _ in range(60)]
    assert all(played[:2])
    assert all(played) if goes_on else not any(played[12:])
    assert play(pace, {True: [2], False: [1]}, 6, [NOTHING], [0]), "where nothing is copied drafts go on"


@pytest.mark.parametrize(("token", "paid"), [(7, False), (8, True)])
def test_drafts_pay_by_what_copies_do_not_bring(token: int, paid: bool) -> None:
    """Without copies the drafts are wrong; beside copies the first two tokens, which are 7s, are right."""
    pace, copy = pace_of(TreeConfig(draft_cost=0.02, node_cost=0.0)), chain_of([token] * 2, log(0.6))
    for _ in range(20):
        assert play(pace, {True: [1]}, 6, [NOTHING], [0])
        play(pace, {True: [3], False: [3]}, 6, [copy], [0])
    assert pace._record.paid is paid


def test_drafts_are_not_compared_with_text_that_has_a_gap() -> None:
    """Rounds beside other calls are counted elsewhere."""
    found = []
    for left_out in (True, False):
        pace = pace_of(TreeConfig(draft_cost=0.1, node_cost=0.01))
        assert play(pace, {True: [2]}, 6, [chain_of([7] * 4, log(0.6))], [0])
        before = pace._record.beyond_copies
        if left_out:
            pace.leave_out()
        pace.count(False, [[5]], [50], 1, 0, {})
        found.append(pace._record.beyond_copies == before)
    assert found == [True, False]


def test_drafts_beside_copies_are_tried_again() -> None:
    pace, copy = pace_of(TreeConfig(draft_cost=0.1, node_cost=0.01)), chain_of([7] * 4, log(0.6))
    found = runs([play(pace, {True: [2], False: [5]}, 6, [copy], [0]) for _ in range(1000)])
    assert found[1][1] > 50
    assert 2 < len(found) < 20


def test_a_batch_is_drafted_for_the_rows_that_need_it() -> None:
    """One row in a loop spares no draft that three others need; rows that are far ahead count for nothing."""
    brings = {True: [9, 3, 3, 3], False: [9, 1, 1, 1]}
    copies = [LOOP, NOTHING, NOTHING, NOTHING]
    config = TreeConfig(draft_cost=0.25, node_cost=0.01)
    assert all(play(pace_of(config, 4), brings, 4, copies, [0] * 4) for _ in range(9))
    assert not play(pace_of(config, 4), brings, 4, copies, [0, 900, 900, 900])
    assert play(pace_of(config, 4), brings, 4, copies, [900, 0, 0, 0])


def test_drafts_are_judged_by_what_copies_alone_would_not_verify() -> None:
    """Copies that are right, though too unlikely to be verified without a draft, count as a draft's.

    Nothing is known of depths below the first wrong one.
    """
    counted = []
    for chance in (0.9, 0.1):
        pace = pace_of(TreeConfig(draft_cost=0.1, node_cost=0.3))
        pace.choose([chain_of([7] * 3, log(chance))], [1.0], [DEPTH])
        before = pace._record.chances.copy()
        pace.count(True, [[7, 7, 5]], [9], 4, DEPTH, {})
        counted.append((pace._record.chances != before).tolist())
    assert counted == [[False, False, True, False], [True, True, True, False]]


def test_a_draft_goes_on_where_copies_end() -> None:
    """Below what copies have right it has as good a chance as below what it has right itself."""
    pace = pace_of(TreeConfig(draft_cost=0.1, node_cost=0.0))
    alone = pace._expected(NOTHING, DEPTH)
    assert alone == pytest.approx(sum(_PRIOR**depth for depth in range(1, DEPTH + 1)))
    pace._alone = 2
    right = chain_of([7] * 2, log(1 - 1e-9))  # both of them
    assert pace._expected(right, DEPTH) == pytest.approx(sum(_PRIOR**depth for depth in range(1, DEPTH - 1)))
    assert 0 < pace._expected(chain_of([7] * 2, log(0.5)), DEPTH) < alone
    assert pace._expected(right, 2) == pytest.approx(0, abs=1e-6)


def test_looking_for_copies_is_no_cost_of_drafts() -> None:
    """Rounds without a draft take that time too."""
    pace, spent = pace_of(TreeConfig(), timed=("draft_cost", "node_cost")), dict.fromkeys(("draft", "verify"), 0.0)
    for number in range(20):
        drafted = number >= 6
        pace.choose([NOTHING], [1.0], [DEPTH])
        spent["verify"] += 1.0
        spent["draft"] += 0.25 + drafted
        pace.count(drafted, [[7]], [9], 1, 0, spent)
    assert pace._cost_of_looks() == pytest.approx(1 / 1.25)


def test_costs_of_drafts_are_known_before_a_trial_ends() -> None:
    """The first drafts of a process take longer than later ones."""
    pace, spent = pace_of(TreeConfig(), timed=("draft_cost", "node_cost")), dict.fromkeys(("draft", "verify"), 0.0)
    drafted = 0
    for _ in range(40):
        chosen, _ = pace.choose([NOTHING], [1.0], [DEPTH])
        spent["verify"] += 1.0
        spent["draft"] += (9.0 if drafted < 4 else 0.2) * chosen
        drafted += chosen
        pace.count(chosen, [[7] * (4 if chosen else 1)], [9], 5 if chosen else 1, DEPTH if chosen else 0, spent)
    assert drafted > 30


def test_dear_drafts_that_add_nothing_are_soon_left_to_others() -> None:
    """A trial ends after three of them, and calls of another kind try one."""
    records: dict[Any, PaceRecord] = {}
    for kind, tries in (("a", 3), ("b", 1), ("c", 1)):
        timed = ("draft_cost", "node_cost")
        pace = pace_of(TreeConfig(), timed=timed, records=records, kind=("costs", kind))
        drafted, spent = 0, dict.fromkeys(("draft", "verify"), 0.0)
        for _ in range(40):
            chosen, _ = pace.choose([NOTHING], [1.0], [DEPTH])
            spent["verify"] += 1.0
            spent["draft"] += 1.5 * chosen
            drafted += chosen
            pace.count(chosen, [[7]], [9], 5 if chosen else 1, DEPTH if chosen else 0, spent)
        pace.finish(LookupDrafter())
        assert drafted == tries, kind


def test_weights_of_rows() -> None:
    weights = row_weights([30, 34, 90, 7], [9, 9, 9, 0])
    assert sum(weights) == pytest.approx(1)
    assert weights[0] > weights[1] > 100 * weights[2] > weights[3] == 0, "who has ended, or is far ahead, is ignored"
    assert row_weights([5, 5], [9, 9]) == [0.5, 0.5]
    assert row_weights([5, 6], [0, 0]) == [0.0, 0.0]


def test_a_row_that_is_about_to_end_says_nothing_of_drafts() -> None:
    """Its tree had no room for them; and the other's copy has not gone wrong yet."""
    chances = []
    for room in (1, 5):
        pace = pace_of(TreeConfig(draft_cost=0.3, node_cost=0.0), 2)
        pace.choose([LOOP, NOTHING], [0.5, 0.5], [DEPTH, room - 1])
        before = pace._record.chances.copy()
        pace.count(True, [[7] * 3, [5]], [9, room], 6, DEPTH, {})
        chances.append((pace._record.chances == before).all())
    assert chances == [True, False]


def test_what_came_of_each_row_is_counted(target: Any, head: DartHead, noted: Any) -> None:
    """The tokens of the round: none of rows that have ended, or stood still."""
    inputs = prompts([7, 7, 7, 7])
    told = noted(Pace, "count", lambda pace, drafted, tokens, *_: tokens)
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": [*range(2, 8)], "pad_token_id": 0}
    stock, _ = assert_identical(target, head, inputs, **options)
    came = [[token for tokens in told for token in tokens[row]] for row in range(4)]
    texts = [text[: len(tokens)] for text, tokens in zip(stock.sequences[:, 8:].tolist(), came, strict=True)]
    assert came == texts
    assert len({len(tokens) for tokens in came}) > 1, "some were to end early"


def test_drafts_that_the_slowest_row_has_nothing_of_do_not_pay() -> None:
    config = TreeConfig(draft_cost=0.3, node_cost=0.0)
    assert not all(rounds(pace_of(config, 2), 40, [1, 3], 4)), "the mean of both rows is 2"
    assert all(rounds(pace_of(config, 2), 40, [2, 3], 4))
    turns, so_far = pace_of(config, 2), [0, 0]
    for number in range(40):
        drafted = play(turns, {True: [1, 3] if number % 2 else [3, 1]}, 4, [NOTHING] * 2, so_far)
        assert drafted, "each is ahead in its turn"
    beside = pace_of(config, 2)
    for _ in range(40):
        drafted, _ = beside.choose([NOTHING] * 2, [0.5, 0.5], [DEPTH] * 2)
        assert drafted, "calls of their own weigh the same, whoever is ahead"
        beside.count(drafted, [[7], [7] * 3], [50] * 2, 4, 0, {})


def test_says_once_that_drafts_do_not_pay(target: Any, head: DartHead, caplog: pytest.LogCaptureFixture) -> None:
    config = TreeConfig(draft_cost=9.0, node_cost=1e-4, lookup=0)
    inputs = {**prompts([9]), "do_sample": True, "top_k": 0}
    assert_identical(target, head, prompts([9]), do_sample=True, top_k=0, max_new_tokens=40, tree_config=config)
    assert not caplog.messages, "one pause may be an accident"
    for _ in range(2):
        target.generate(**inputs, assistant=head, max_new_tokens=90, tree_config=config)
        stats = head.last_stats
        assert stats.paused_rounds > 64
        assert stats.to_dict()["paused_rounds"] == stats.paused_rounds
    (message,) = caplog.messages
    for cause in ("chat template", "language", "thinking", "another target"):
        assert cause in message


@pytest.mark.parametrize(
    ("fields", "device", "emitted", "nodes", "pays"),
    [
        ({"draft_cost": 0.3, "node_cost": 0.1}, "cpu", [2], 6, True),
        ({"draft_cost": 0.3, "node_cost": 0.1}, "cpu", [2, 2], 3, True),
        ({"draft_cost": 0.3, "node_cost": 0.1}, "cpu", [2, 2], 5, False),
        ({"draft_cost": 9.0, "nodes": 8}, "cpu", [1], 8, True),  # as they are asked for
        ({"draft_cost": 0.2}, "cuda", [2, 2], 64, True),  # nodes that cost nothing are not charged
        ({"draft_cost": 0.1, "verify_costs": ((1, 1), (64, 9.0))}, "cuda", [2, 2], 32, False),
    ],
)
def test_drafts_that_pay_go_on(fields: dict[str, Any], device: str, emitted: list[int], nodes: int, pays: bool) -> None:
    pace = pace_of(TreeConfig(**fields), len(emitted), device)
    assert all(rounds(pace, 50, emitted, nodes)) == pays


@pytest.mark.parametrize("keeps", [False, True])
def test_a_tree_of_one_node_asks_no_drafter(
    target: Any, head: DartHead, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"do_sample": False, "return_dict_in_generate": keeps}
    with monkeypatch.context() as patch:
        patch.setattr(head, "propose", None)
        patch.setattr(RowCopies, "suggest", None)
        tree = TreeConfig(nodes=1)
        text = target.generate(**prompts([9]), **options, assistant=head, max_new_tokens=12, tree_config=tree)
    stats = head.last_stats
    assert (stats.tau, stats.drafted, stats.paused_rounds) == (1.0, 0, stats.rounds)
    if keeps:  # what was not drafted after is taken in by the next turn
        ids = text.sequences
        again = target.generate(ids, **{CACHE: text[CACHE]}, assistant=head, max_new_tokens=9, do_sample=False)
        assert again.tolist() == target.generate(ids, max_new_tokens=9, do_sample=False).tolist()


@pytest.mark.parametrize("cost", [0.5, 0.1])
def test_a_call_goes_on_where_the_last_of_its_kind_ended(cost: float) -> None:
    """Drafts that do not pay are tried once, and not by each of many short calls; other kinds learn for themselves."""
    config = TreeConfig(draft_cost=cost, node_cost=0.0)
    drafter = LookupDrafter()
    records: dict[Any, PaceRecord] = {}
    short: list[list[bool]] = []
    for kept in (records, None):
        drafted: list[bool] = []
        for _ in range(10):
            pace = pace_of(config, records=kept, kind=("text",))
            drafted += rounds(pace, 8, [1], nodes=4)
            pace.finish(drafter)
        short.append(drafted)
    one_call = rounds(pace_of(config), 10 * 8, [1], nodes=4)
    assert short[0] == one_call
    assert sum(short[1]) > 2 * sum(one_call)
    (record,) = records.values()
    paused = record.paused
    assert rounds(pace_of(config, records=records, kind=("text",)), 1, [1], nodes=4) == [False]
    assert record.paused == paused, "a call that breaks off leaves nothing"
    assert rounds(pace_of(config, records=records, kind=("code",)), 1, [1], nodes=4) == [True]
    for other in range(200):
        pace_of(config, records=records, kind=(other,)).finish(drafter)
    assert len(records) < 100


@pytest.mark.parametrize(
    ("batch", "given_up", "tried"), [(1, (40, 21), [6, 3, 3, 0, 0, 0]), (4, (10, 10), [2, 1, 1, 0, 0, 0])]
)
def test_a_new_text_may_be_of_another_kind(batch: int, given_up: tuple[int, int], tried: list[int]) -> None:
    """Drafts that have paid are tried by the next calls, and given up sooner than in the text in which they paid."""
    config, drafter = TreeConfig(draft_cost=0.3, node_cost=0.0), LookupDrafter()
    records: dict[Any, PaceRecord] = {}

    def drafted(count: int, tokens: int) -> int:
        pace = pace_of(config, batch, records=records)
        played = rounds(pace, count, [tokens] * batch, nodes=1)
        pace.finish(drafter)
        assert played == sorted(played, reverse=True), "after a pause in the same text"
        return sum(played)

    assert drafted(40, 2) == 40
    same = pace_of(config, batch)
    rounds(same, 40, [2] * batch, nodes=1)
    assert (sum(rounds(same, 50, [1] * batch, nodes=1)), drafted(50, 1)) == given_up
    assert [drafted(20, 1) for _ in tried] == tried
    assert drafted(40, 2) == 40
    assert drafter.warned is False
    records.clear()
    assert [bool(drafted(20, 1)) for _ in range(3)] == [True, False, False], "they never paid"


def test_kinds_of_calls(target: Any, head: DartHead) -> None:
    """A call goes on as those that choose their tokens in the same way, and tries for itself beside others."""
    config = TreeConfig(draft_cost=9.0, node_cost=1e-4)
    sampled: dict[str, Any] = {"do_sample": True, "top_k": 0}

    def tries(**options: Any) -> int:
        assert_identical(target, head, prompts([9]), max_new_tokens=20, tree_config=config, **options)
        stats = head.last_stats
        return stats.rounds - stats.paused_rounds

    assert tries(**sampled) > 0
    assert tries(**sampled) == 0, "the call before has just tried"
    assert tries(**sampled, temperature=0.5) > 0
    assert tries(do_sample=False) > 0


def test_a_drafter_that_pauses_for_a_whole_call_reads_nothing(
    target: Any, head: DartHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"do_sample": False, "tree_config": TreeConfig(draft_cost=9.0, node_cost=1e-4)}
    assert_identical(target, head, prompts([9, 4]), max_new_tokens=20, **options)
    read: list[int] = []
    extend = head.extend
    monkeypatch.setattr(head, "extend", lambda *given: read.append(1) or extend(*given))
    assert_identical(target, head, prompts([9, 4]), max_new_tokens=20, **options)
    assert not read
    assert_identical(target, head, prompts([9, 4]), max_new_tokens=90, **options)
    assert head.last_stats.paused_rounds < head.last_stats.rounds, "drafts are tried again in a longer call"
    assert read


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", [[9], [9, 3, 7, 12]], ids=["one", "four"])
def test_pauses_change_no_token(
    target: Any, head: DartHead, lengths: list[int], options: dict[str, object], noted: Any
) -> None:
    """Rows that stop early, stand still or run ahead while drafting pauses take their positions in later."""
    config = TreeConfig(draft_cost=9.0, node_cost=1e-4)

    def last(state: Any, features: Any, tokens: Any, counts: Any, *_: Any) -> tuple[int, torch.Tensor]:
        """Positions of the first row that the draft knows, and the token after them."""
        return int(state.lengths[0] + counts[0]), tokens[0, counts[0] - 1]

    taken = noted(head, "propose", last)
    for eos in ([], [5, 11]):
        stopping = {"eos_token_id": eos, "pad_token_id": 0} if eos else {}
        taken.clear()
        more = {**options, **stopping, "max_new_tokens": 90, "tree_config": config}
        stock, _ = assert_identical(target, head, prompts(lengths), **more)
        stats = head.last_stats
        if not eos and options["do_sample"]:
            assert stats.plain_rounds >= 8
            assert stats.rounds >= stats.paused_rounds + 2, "drafting was tried again"
            assert stats.accepted > 0
        if len(lengths) == 1:
            assert [stock.sequences[0, place] for place, _ in taken] == [token for _, token in taken]


@pytest.mark.parametrize("lengths", [[9], [9, 3, 7, 12]], ids=["one", "four"])
def test_a_loop_is_copied_and_not_drafted(target: Any, head: DartHead, lengths: list[int], noted: Any) -> None:
    """Where each token says the next one, text is soon a loop."""
    for layer in target.model.layers:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.data.zero_()
    drafts = noted(head, "propose", lambda *_: None)
    config = TreeConfig(draft_cost=0.2, node_cost=0.02)
    assert_identical(target, head, prompts(lengths), do_sample=False, max_new_tokens=240, tree_config=config)
    stats = head.last_stats
    assert stats.tau > 3
    assert stats.paused_rounds > 0.5 * stats.rounds
    assert len(drafts) == stats.rounds - stats.paused_rounds
    apart = TreeConfig(draft_cost=0.0, node_cost=0.0, lookup=0)
    assert_identical(target, head, prompts(lengths), do_sample=False, max_new_tokens=40, tree_config=apart)
    assert head.last_stats.paused_rounds == 0


class Clock:
    """Seconds by phase, as `DraftStats` counts them, and the rounds of a call that take them."""

    def __init__(self, pace: Pace) -> None:
        self.pace, self.seconds = pace, dict.fromkeys(("prefill", "draft", "grow", "verify"), 0.0)

    def round(self, drafted: bool, nodes: int, draft: float, grow: float, verify: float) -> None:
        for name, spent in (("draft", draft), ("grow", grow), ("verify", verify)):
            self.seconds[name] += spent
        self.pace._time(drafted, nodes, min(nodes - 1, 2), self.seconds)


TIMED_COSTS = Pace.timed_costs
"""What `untimed` takes from all tests but those that ask for it."""


def timed(rounds: Iterable[tuple[bool, int, float, float, float]], batch: int = 1, **fields: Any) -> Pace:
    """The pace after rounds of a mode, nodes, and seconds of draft, growth and forward."""
    config = TreeConfig(**fields)
    measured = TIMED_COSTS(config, "cpu")
    clock = Clock(pace_of(replace(config, draft_cost=fields.get("draft_cost", 0.25)), batch, timed=measured))
    for one in rounds:
        clock.round(*one)
    clock.pace.finish(LookupDrafter())  # the last rounds may wait to be learnt from
    return clock.pace


@pytest.mark.parametrize(
    ("fields", "device", "names"),
    [
        ({}, "cpu", {"draft_cost", "node_cost"}),
        ({"draft_cost": 0.1, "level_cost": 0.1}, "cpu", {"node_cost"}),
        ({"node_cost": 0.1}, "cpu", {"draft_cost"}),
        ({"verify_costs": ((1, 1), (2, 2))}, "cpu", {"draft_cost"}),
        ({"verify_costs": ((1, 1), (2, 2)), "draft_cost": 0.1}, "cpu", set()),
        ({"nodes": 8}, "cpu", set()),
        ({}, "cuda", set()),
    ],
)
def test_costs_that_are_timed(fields: dict[str, Any], device: str, names: set[str]) -> None:
    assert TIMED_COSTS(TreeConfig(**fields), device) == names


def test_the_cost_of_a_draft_is_the_median_of_its_times() -> None:
    # Two rows of three nodes cost 1 + 0.1 + 2 * 2 * 0.1 of a plain round: 1.5 s are what 1 s is without a draft.
    drafts = [(True, 3, 0.4, 0.1, 1.5)] * 3
    known: dict[str, Any] = {"batch": 2, "node_cost": 0.1}
    pace = timed(drafts, **known)
    assert pace.cost().draft == pytest.approx(0.5), "growing its trees included"
    assert pace.cost(False).draft == 0
    assert pace.cost().of(3) == pytest.approx(2.0), "given costs stay"
    assert timed([(True, 3, 4.0, 1.0, 15.0)] * 3, **known).cost().draft == pytest.approx(0.5), "a busy machine"
    assert timed(drafts[:2], **known).cost().draft == 0.25
    late = [*drafts, (True, 3, 50.0, 0.1, 1.5), (True, 3, 0.4, 0.1, 0.0), *drafts]
    assert timed(late, **known).cost().draft == pytest.approx(0.5)
    assert timed(drafts, draft_cost=0.3, **known).cost().draft == 0.3
    refined = timed([(True, 3, 0.9, 0.0, 1.5)] * 3, refine=2, **known)
    assert refined.cost().draft == pytest.approx(0.9)


def verified(sizes: list[int], count: int, cost: Callable[[int], float], seed: int = 0) -> list[Any]:
    """Rounds that take what `cost` says of their nodes, a few per cent more or less, on a slow machine."""
    random = Random(seed)
    rounds = []
    for _ in range(count):
        nodes = random.choice(sizes)
        rounds.append((True, nodes, 0.0, 0.0, 0.3 * cost(nodes) * random.uniform(0.95, 1.05)))
    return rounds


def test_verifying_costs_what_rounds_of_each_size_took() -> None:
    """With falling steps, and straight lines between sizes that were run."""
    true = {1: 1.0, 2: 1.5, 6: 2.4, 8: 1.9, 30: 2.6}
    rounds = verified(list(true), 400, true.__getitem__)
    late = (True, 30, 0.0, 0.0, 300.0)
    for shown in (rounds, [*rounds, late]):
        cost = timed(shown).cost(False)
        for size, known in true.items():
            assert cost.of(size) == pytest.approx(known, rel=0.1)
        assert cost.of(6) > cost.of(7) > cost.of(8)


@pytest.mark.parametrize("sizes", [[1], [8]])
def test_what_rounds_cannot_tell_stays_as_it_was(sizes: list[int]) -> None:
    cost, known = timed(verified(sizes, 80, lambda nodes: 7.0)).cost(False), timed([]).cost(False)
    assert cost.verify.tolist() == pytest.approx(known.verify.tolist(), rel=0.05)


def test_a_size_that_seemed_dear_is_tried_again() -> None:
    """The cost of a size that is not run any more draws nearer to that of the one that is."""
    dear = [*verified([1, 4], 40, lambda nodes: 1.2), *verified([9], 3, lambda nodes: 9.0)]
    rounds = [*dear, *verified([1, 4], 800, lambda nodes: 1.2)]
    assert timed(dear).cost(False).of(9) > 1.2 * timed(rounds).cost(False).of(9)


def test_rounds_without_a_draft_are_timed_now_and_then() -> None:
    """Costs are relative to them, first of all; where copies are likely, or nothing is timed, none is held for it."""
    weak = chain_of([7], log(0.3))
    timed: tuple[str, ...] = ("node_cost",)
    cases = ((timed, NOTHING, True), (timed, weak, True), (timed, LOOP, False), ((), weak, False))
    for timing, copies, wanted in cases:
        pace = pace_of(TreeConfig(draft_cost=0.0, node_cost=0.0), timed=timing)
        plain = []
        for number in range(400):
            drafted, held = pace.choose([copies], [1.0], [DEPTH])
            assert len(held[0]) == (0 if wanted and not drafted else len(copies))
            plain.append(not drafted)
            pace.count(drafted, [[7, 7, 7]], [50], 1 if plain[-1] else 4, 2, {"verify": 1.0 + number})
        assert plain[:5] == [wanted] * 4 + [False]
        assert 5 * wanted <= sum(plain) <= 6 * wanted


def test_later_calls_know_what_earlier_ones_took() -> None:
    records: dict[Any, PaceRecord] = {}
    new = partial(pace_of, TreeConfig(draft_cost=0.25), timed=("draft_cost", "node_cost"), records=records)
    first, beside = new(), new()
    clock = Clock(first)
    for one in verified([1, 8], 60, {1: 1.0, 8: 3.0}.__getitem__):
        clock.round(*one)
    text = [1, 2, 3] * 8
    row = RowCopies(text)
    for token in text[:12]:
        row.suggest(4)
        text.append(token)
    before = first.copied_chances()
    first.finish(LookupDrafter(), [row])
    later = new()
    assert max(map(sub, later.copied_chances(), before)) > 0.01  # they were right
    assert later.cost().verify.tolist() == first.cost().verify.tolist()
    assert later.cost().draft == first.cost().draft == 0
    beside.finish(LookupDrafter())
    assert new().copied_chances() == later.copied_chances(), "a call that began before adds to what is known by its end"


def test_a_first_round_that_is_late_counts_as_any_other() -> None:
    records: dict[Any, PaceRecord] = {}
    costs, late = {1: 1.0, 8: 3.0}, (True, 8, 0.0, 0.0, 2 * 0.3 * 3.0)
    for rounds in (verified([1, 8], 200, costs.__getitem__), [late, *verified([8], 40, costs.__getitem__)]):
        clock = Clock(pace_of(TreeConfig(draft_cost=0.25), timed=("node_cost",), records=records))
        for one in rounds:
            clock.round(*one)
        clock.pace.finish(LookupDrafter())
        assert clock.pace.cost(False).of(8) == pytest.approx(3.0, rel=0.1)


def test_calls_measure_their_rounds(target: Any, head: DartHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a drafter for another target starts from nothing."""
    monkeypatch.setattr(Pace, "timed_costs", TIMED_COSTS)
    options = {"do_sample": False, "max_new_tokens": 40, "tree_config": TreeConfig(lookup=0)}
    assert_identical(target, head, prompts([7, 5]), **options)
    (record,) = head.pace_records.values()
    assert record.timed.sum() > 10
    assert record.timed[0] > 0
    assert min(record.draft_costs) > 0
    assert_identical(target, head, prompts([7, 5]), **{**options, "tree_config": TreeConfig()})
    assert max(one.copy_counts.seen.max() for one in head.pace_records.values()) > CopyCounts().seen.max()
    head.bind(tiny_target("qwen3"))
    assert not head.pace_records
    copies = LookupDrafter()
    for model in (target, attach(tiny_target("llama")), target):
        assert_identical(model, copies, prompts([7, 5]), do_sample=False, max_new_tokens=40)
    assert len(copies.pace_records) == 2, "one for each target"


def test_trees_are_filled_up_where_that_costs_nothing() -> None:
    """Sizes of one forward cost the same, so that the largest of them is worth most; others are as they were."""
    pace = Pace(TreeConfig(draft_cost=0.1), "cpu", 1, 6)
    before = pace.cost().verify
    pace.fill_up(lambda nodes: 8 * -(-nodes // 8))
    filled = pace.cost().verify
    assert filled[:8].tolist() == [before[7]] * 8
    assert filled[8:16].tolist() == [before[15]] * 8
    pace.fill_up(None)
    assert pace.cost().verify.tolist() == before.tolist()


def test_rounds_count_for_the_size_that_they_were_run_by() -> None:
    """Also those that wait to be learnt from when trees begin to be filled up."""
    records: dict[Any, PaceRecord] = {}
    pace = Pace(TreeConfig(), "cpu", 1, 6, {"node_cost"}, records)
    for number, nodes in enumerate([1, 4, 4, 4]):
        pace.count(False, [[3]], [9], nodes, 1, {"verify": 1.0 + number})
    pace.fill_up(lambda nodes: 8)
    pace.finish(LookupDrafter())
    (record,) = records.values()
    assert record.timed.nonzero()[0].tolist() == [0, 3]


def test_a_round_that_compiles_shows_no_cost() -> None:
    pace = Pace(TreeConfig(), "cpu", 1, 6, {"node_cost"})
    seconds = dict.fromkeys(("draft", "grow", "verify"), 0.0)

    def one_round(nodes: int, verify: float) -> list[float]:
        seconds["verify"] += verify
        pace.count(False, [[3]], [9], nodes, int(nodes > 1), seconds)
        return pace.cost().verify.tolist()

    one_round(1, 0.01)
    before = one_round(8, 0.01)
    pace.leave_out()
    assert one_round(8, 30.0) == before
    assert [one_round(8, 0.03) for _ in range(4)][-1] != before  # they are learnt from together
