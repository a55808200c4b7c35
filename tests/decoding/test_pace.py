"""Pauses and chains where drafts bring less than they cost: when they come, and that they change no token."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from math import inf, log
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_identical
from support.tiny import prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target

from hf_dart import TreeConfig
from hf_dart.decoding.drafter_runner import joined
from hf_dart.decoding.experience import Course, Experience, Surplus
from hf_dart.decoding.pace import Pace, shares
from hf_dart.drafters.cost import _CALL
from hf_dart.drafters.lookup import LookupDrafter
from hf_dart.drafters.proposal import Verified
from hf_dart.trees.copies import Copy

DEPTH = 4
NOTHING: Copy = ([], -inf)
LOOP: Copy = ([7] * 24, -0.02)
"""What is copied where nothing is found, and in a loop; `play` lets 7s come."""


def play(pace: Pace, emitted: Callable[[str], list[int]], nodes: int, copies: list[Copy], so_far: list[int]) -> str:
    """Play a round that brings so many tokens per row, by how it is drafted, which is returned."""
    limits = [50] * len(copies)
    level = pace.choose(copies, shares(so_far, limits), [DEPTH] * len(copies))
    new = emitted(level)
    pace.count(level, [[7] * tokens for tokens in new], limits, nodes if level != "pause" else 1, 0)
    so_far[:] = [before + tokens for before, tokens in zip(so_far, new, strict=True)]
    return level


def rounds(pace: Pace, count: int, emitted: list[int], nodes: int) -> list[bool]:
    """Play rounds that bring so many tokens where they are drafted; which of them were."""
    plain, so_far = [min(1, tokens) for tokens in emitted], [0] * len(emitted)

    def brought(level: str) -> list[int]:
        return plain if level == "pause" else emitted

    return [play(pace, brought, nodes, [NOTHING] * len(emitted), so_far) != "pause" for _ in range(count)]


def levels(pace: Pace, count: int, emitted: dict[str, int], nodes: int) -> list[tuple[str, int]]:
    """Play rounds of one row that bring so many tokens at each level; the levels, and for how many rounds each held."""
    played = [play(pace, lambda level: [emitted[level]], nodes, [NOTHING], [0]) for _ in range(count)]
    return [(level, len(list(same))) for level, same in groupby(played)]


CHAINS = TreeConfig(draft_cost=0.3, refine=1)  # where a chain spares a second look at the draft


def test_drafts_that_do_not_pay_pause_longer_and_longer() -> None:
    free = TreeConfig(draft_cost=0.3, node_cost=0.0)
    found = levels(Pace(free, "cpu", DEPTH), 1900, {"tree": 1, "pause": 1}, nodes=6)
    assert found[:8] == [
        ("tree", 11),
        ("pause", 48),
        ("tree", 6),
        ("pause", 192),
        ("tree", 6),
        ("pause", 768),
        ("tree", 6),
        ("pause", 768),
    ]
    found = levels(Pace(CHAINS, "cpu", DEPTH), 900, {"tree": 1, "chain": 1, "pause": 1}, nodes=2)
    assert found[:5] == [("tree", 4), ("chain", 4), ("pause", 48), ("chain", 4), ("pause", 192)]


def test_a_trial_loses_no_more_than_its_stake() -> None:
    for draft, rows in ((1.0, 1), (1.0, 4), (0.5, 4), (0.1, 4)):
        pace = Pace(TreeConfig(draft_cost=draft, node_cost=0.0), "cpu", DEPTH)
        played = rounds(pace, 100, [1] * rows, nodes=1)
        found = [(drafted, len(list(same))) for drafted, same in groupby(played)]
        for (drafted, count), stake in zip(found[::2], (3.0, 1.5), strict=False):
            assert drafted
            allowed = stake / rows**0.5
            assert 0.8 * allowed < (count + 1) * draft <= allowed + 2 * draft + 1e-9
        assert found[1] == (False, 48)
    dear = rounds(Pace(TreeConfig(draft_cost=9.0, node_cost=0.0), "cpu", DEPTH), 60, [1], nodes=1)
    assert [place for place, drafted in enumerate(dear) if drafted] == [0, 49], "even then it is tried"


def test_a_chain_where_a_tree_does_not_pay() -> None:
    found = levels(Pace(CHAINS, "cpu", DEPTH), 300, {"tree": 1, "chain": 2, "pause": 1}, nodes=2)
    assert found[:5] == [("tree", 4), ("chain", 48), ("tree", 2), ("chain", 192), ("tree", 2)]


def test_back_to_a_tree_when_the_text_gets_easier() -> None:
    pace = Pace(CHAINS, "cpu", DEPTH)
    assert levels(pace, 56, {"tree": 1, "chain": 1, "pause": 1}, nodes=2)[-1] == ("pause", 48)
    (first, settling), (then, rest) = levels(pace, 100, {"tree": 3, "chain": 2, "pause": 1}, nodes=2)
    assert (first, then, settling + rest) == ("chain", "tree", 100)
    assert settling < 20


def test_copies_that_suffice_are_not_drafted_beside() -> None:
    """A loop has no drafts though they would be right; where it ends, they go on at once."""
    pace = Pace(TreeConfig(draft_cost=0.25), "cpu", DEPTH)
    brings = {"tree": [3], "pause": [3]}
    assert all(play(pace, brings.__getitem__, 6, [NOTHING], [0]) == "tree" for _ in range(20))
    loop = [play(pace, {"tree": [20], "pause": [20]}.__getitem__, 24, [LOOP], [0]) for _ in range(100)]
    assert loop == ["pause"] * 100
    assert play(pace, brings.__getitem__, 6, [NOTHING], [0]) == "tree"
    likely = Pace(TreeConfig(draft_cost=0.5), "cpu", DEPTH)
    assert play(likely, brings.__getitem__, 6, [([7] * 24, log(0.8))], [0]) == "pause", "0.7 tokens, or 1.5 meanwhile"
    free = Pace(TreeConfig(draft_cost=0.0, node_cost=0.0), "cpu", DEPTH)
    assert play(free, brings.__getitem__, 6, [LOOP], [0]) == "tree", "what costs nothing is always worth it"


def test_a_batch_is_drafted_for_the_rows_that_need_it() -> None:
    """One row in a loop spares no draft that three others need; rows that are far ahead count for nothing."""
    brings: dict[str, list[int]] = {"tree": [9, 3, 3, 3], "pause": [9, 1, 1, 1]}
    copies = [LOOP, NOTHING, NOTHING, NOTHING]
    config = TreeConfig(draft_cost=0.25, node_cost=0.01)
    assert {play(Pace(config, "cpu", DEPTH), brings.__getitem__, 4, copies, [0] * 4) for _ in range(9)} == {"tree"}
    assert play(Pace(config, "cpu", DEPTH), brings.__getitem__, 4, copies, [0, 900, 900, 900]) == "pause"
    assert play(Pace(config, "cpu", DEPTH), brings.__getitem__, 4, copies, [900, 0, 0, 0]) == "tree"


def test_what_drafts_bring_beside_copies() -> None:
    """The chances are those of a draft where the copy is wrong: found again by counting."""
    generator = np.random.default_rng(0)
    surplus = Surplus(DEPTH, 1.0, 0.2)
    copied, drafted = generator.geometric(0.3, 4000) - 1, generator.geometric(0.5, 4000) - 1
    for right, accepted in zip(copied, np.maximum(copied, drafted), strict=True):
        surplus.learn(1.0, int(right), int(accepted), DEPTH)
    late = slice(-200, None)
    for depth in range(1, DEPTH + 1):
        wrong = copied[late] < depth
        assert surplus.chances[depth - 1] == pytest.approx((drafted[late][wrong] >= depth).mean(), abs=0.2)
    ([], chance), (tokens, logs) = NOTHING, ([7] * 3, log(0.5))
    assert surplus.expected(([], chance), 0, DEPTH) == pytest.approx(surplus.chances.sum())
    assert surplus.expected(NOTHING, 0, 2) == pytest.approx(surplus.chances[:2].sum())
    assert surplus.expected(NOTHING, 0, -1) == 0
    q = surplus.chances
    assert surplus.expected((tokens, logs), 3, DEPTH) == pytest.approx(0.5 * q[0] + 0.75 * q[1] + 0.875 * q[2] + q[3])
    unverified = surplus.expected((tokens, logs), 1, DEPTH) - surplus.expected((tokens, logs), 3, DEPTH)
    assert unverified == pytest.approx(0.25 + 0.125), "what is not verified alone comes with a draft"


def test_what_a_row_counts_for() -> None:
    emitted, limits = [30, 34, 90, 7], [9, 9, 9, 0]
    parts = shares(emitted, limits)
    assert sum(parts) == pytest.approx(1)
    assert parts[0] > parts[1] > 100 * parts[2] > parts[3] == 0, "who has ended, or is far ahead, does not count"
    assert shares([5, 5], [9, 9]) == [0.5, 0.5]
    assert shares([5, 6], [0, 0]) == [0.0, 0.0]


def test_a_row_that_is_about_to_end_says_nothing_of_drafts() -> None:
    """Its tree had no room for them; and the other's copy has not gone wrong yet."""
    chances = []
    for room in (1, 5):
        pace = Pace(TreeConfig(draft_cost=0.3, node_cost=0.0), "cpu", DEPTH)
        pace.choose([LOOP, NOTHING], [0.5, 0.5], [DEPTH, room - 1])
        surplus = pace._course.surplus
        assert surplus is not None
        before = surplus.chances.copy()
        pace.count("tree", [[7] * 3, [5]], [9, room], 6, DEPTH)
        chances.append((surplus.chances == before).all())
    assert chances == [True, False]


def test_what_came_of_each_row_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the round: none of rows that have ended, or stood still."""
    target = tiny_target("llama")
    head, inputs = tiny_head(target), prompts([7, 7, 7, 7])
    came: list[list[int]] = [[], [], [], []]
    count = Pace.count

    def watched(self: Pace, level: str, tokens: list[list[int]], *more: Any) -> None:
        for row, new in enumerate(tokens):
            came[row] += new
        count(self, level, tokens, *more)

    monkeypatch.setattr(Pace, "count", watched)
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": [*range(2, 8)], "pad_token_id": 0}
    stock, _ = assert_identical(target, head, inputs, **options)
    texts = [text[: len(tokens)] for text, tokens in zip(stock.sequences[:, 8:].tolist(), came, strict=True)]
    assert came == texts
    assert len({len(tokens) for tokens in came}) > 1, "some were to end early"


def test_drafts_that_the_slowest_row_has_nothing_of_do_not_pay() -> None:
    config = TreeConfig(draft_cost=0.3, node_cost=0.0)
    assert not all(rounds(Pace(config, "cpu", DEPTH), 40, [1, 3], 4)), "the mean of both rows is 2"
    assert all(rounds(Pace(config, "cpu", DEPTH), 40, [2, 3], 4))
    turns, so_far, number = Pace(config, "cpu", DEPTH), [0, 0], 0
    for number in range(40):
        level = play(turns, lambda _: [1, 3] if number % 2 else [3, 1], 4, [NOTHING] * 2, so_far)  # noqa: B023
        assert level == "tree", "each is ahead in its turn"


def test_what_a_draft_is_taken_to_cost() -> None:
    """By weights and by their number: a head beside which the target is small is charged for it."""
    target = tiny_target("llama")
    small, large = tiny_head(target), tiny_head(target, num_layers=5)
    assert 0.2 < small.draft_cost(target) < large.draft_cost(target)
    lm_head, embeddings = target.get_output_embeddings().weight, target.get_input_embeddings().weight
    own, read = ([weight.numel() for weight in model.parameters()] for model in (small, target))
    looked_up = 0 if lm_head is embeddings else embeddings.numel()
    ratio = (sum(own) + lm_head.numel() + _CALL * (len(own) + 1)) / (sum(read) - looked_up + _CALL * len(read))
    assert small.draft_cost(target) == pytest.approx(0.1 + ratio)
    alone = tiny_head(target, own_lm_head=True)
    assert alone.lm_head_weights == 0
    few = tiny_head(target, draft_vocab_size=12)
    assert few.draft_cost(target) < small.draft_cost(target)
    step = tiny_eagle_drafter(target)
    assert step.draft_cost(target, 4) - 0.1 == pytest.approx(4 * (step.draft_cost(target, 1) - 0.1))
    several = tiny_diffusion_drafter(target)
    assert [several.passes(depth) for depth in (1, 3, 5)] == [3, 3, 3]
    assert LookupDrafter().tree_config.draft_cost == 0


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("hf_dart")]


def test_says_once_that_drafts_do_not_pay(caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    config = TreeConfig(draft_cost=9.0, node_cost=1e-4, lookup=0)
    inputs = {**prompts([9]), "do_sample": True, "top_k": 0}
    assert_identical(target, head, prompts([9]), do_sample=True, top_k=0, max_new_tokens=40, tree_config=config)
    assert not said(caplog), "one pause may be an accident"
    for _ in range(2):
        target.generate(**inputs, assistant=head, max_new_tokens=90, tree_config=config)
        stats = head.last_stats
        assert stats is not None
        assert stats.paused_rounds > 48
        assert stats.to_dict()["paused_rounds"] == stats.paused_rounds
    assert len(said(caplog)) == 1
    for cause in ("chat template", "language", "thinking", "another target"):
        assert cause in said(caplog)[0]


def test_drafts_that_pay_go_on() -> None:
    for config, emitted, nodes in (
        (TreeConfig(draft_cost=0.3, node_cost=0.1), [2], 6),
        (TreeConfig(draft_cost=0.3, node_cost=0.1), [2, 2], 3),
        (TreeConfig(draft_cost=9.0, nodes=8), [1], 8),
    ):
        assert all(rounds(Pace(config, "cpu", DEPTH), 50, emitted, nodes))
    assert not all(rounds(Pace(TreeConfig(draft_cost=0.3, node_cost=0.1), "cpu", DEPTH), 50, [2, 2], 5))
    assert all(rounds(Pace(TreeConfig(), "cuda", DEPTH), 50, [2, 2], 64)), "nodes that cost nothing are not charged"


@pytest.mark.parametrize("keeps", [False, True])
def test_a_tree_of_one_node_asks_no_drafter(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    options = {"do_sample": False, "return_dict_in_generate": keeps}
    with monkeypatch.context() as patch:
        patch.setattr(head, "propose", None)
        tree = TreeConfig(nodes=1)
        text = target.generate(**prompts([9]), **options, assistant=head, max_new_tokens=12, tree_config=tree)
    stats = head.last_stats
    assert stats is not None
    assert (stats.tau, stats.drafted, stats.paused_rounds) == (1.0, 0, stats.rounds)
    if keeps:  # what was not drafted after is taken in by the next turn
        ids = text.sequences
        again = target.generate(
            ids, past_key_values=text.past_key_values, assistant=head, max_new_tokens=9, do_sample=False
        )
        assert again.tolist() == target.generate(ids, max_new_tokens=9, do_sample=False).tolist()


def test_a_call_goes_on_where_the_last_of_its_kind_has_come_to() -> None:
    """What does not pay is tried once, and not by each of many short calls; other kinds learn for themselves."""
    config = TreeConfig(draft_cost=0.5, node_cost=0.0)
    short: list[list[bool]] = []
    for experience in (Experience(), None):
        drafted: list[bool] = []
        for _ in range(12):
            drafted += rounds(Pace(config, "cpu", DEPTH, None, experience, "text"), 8, [1], nodes=4)
        short.append(drafted)
    one_call = rounds(Pace(config, "cpu", DEPTH), 12 * 8, [1], nodes=4)
    assert short[0] == one_call
    assert sum(short[1]) > 2 * sum(one_call)
    experience = Experience()
    assert not all(rounds(Pace(config, "cpu", DEPTH, None, experience, "text"), 40, [1], nodes=4))
    assert rounds(Pace(config, "cpu", DEPTH, None, experience, "code"), 1, [1], nodes=4) == [True]
    for other in range(200):
        experience.go_on(other, Course(0, [], 0.0))
    assert len(experience.courses) < 100


def test_kinds_of_calls() -> None:
    """A call learns from those that choose their tokens in the same way, and not from others."""
    target = tiny_target("llama")
    head = tiny_head(target)
    config = TreeConfig(draft_cost=9.0, node_cost=1e-4)
    sampled: dict[str, Any] = {"do_sample": True, "top_k": 0}

    def tries(**options: Any) -> int:
        assert_identical(target, head, prompts([9]), max_new_tokens=20, tree_config=config, **options)
        stats = head.last_stats
        assert stats is not None
        return stats.rounds - stats.paused_rounds

    assert tries(**sampled) > 0
    assert tries(**sampled) == 0, "the call before has just tried"
    assert tries(**sampled, temperature=0.5) > 0
    assert tries(do_sample=False) > 0


def test_positions_that_waited_are_taken_in_as_they_came() -> None:
    """Those of several rounds, of which each row has some, none or all; features and tokens stay together."""
    rounds = [[2, 0, 3], [1, 1, 1], [0, 2, 1]]
    came: list[list[int]] = [[], [], []]
    chunks, number = [], 0
    for counts in rounds:
        tokens = torch.full((3, 3), -1)
        for row, count in enumerate(counts):
            for place in range(count):
                number += 1
                tokens[row, place] = number
                came[row].append(number)
        chunks.append(Verified(tokens[..., None] * torch.tensor([1.0, 0.5]), tokens, torch.tensor(counts)))
    features, tokens, counts = joined(chunks)
    assert counts.tolist() == [len(row) for row in came]
    for row, wanted in enumerate(came):
        assert tokens[row, : len(wanted)].tolist() == wanted
        assert features[row, : len(wanted), 1].tolist() == [0.5 * token for token in wanted]


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", [[9], [9, 3, 7, 12]], ids=["one", "four"])
def test_pauses_change_no_token(lengths: list[int], options: dict[str, object]) -> None:
    """Rows that stop early, stand still or run ahead while drafting pauses take their positions in later."""
    target = tiny_target("llama")
    head = tiny_head(target)
    config = TreeConfig(draft_cost=9.0, node_cost=1e-4)
    for eos in ([], [5, 11]):
        stopping = {"eos_token_id": eos, "pad_token_id": 0} if eos else {}
        assert_identical(target, head, prompts(lengths), **options, **stopping, max_new_tokens=90, tree_config=config)
        stats = head.last_stats
        assert stats is not None
        if not eos and options["do_sample"]:
            assert stats.plain_rounds >= 16
            assert stats.rounds >= stats.paused_rounds + 2, "drafting was tried again"
            assert stats.accepted > 0


@pytest.mark.parametrize("lengths", [[9], [9, 3, 7, 12]], ids=["one", "four"])
def test_a_loop_is_copied_and_not_drafted(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each token says the next one, text is soon a loop; what was skipped is taken in by later drafts."""
    target = tiny_target("llama")
    for layer in target.model.layers:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.data.zero_()
    head = tiny_head(target)
    taken: list[int] = []
    propose = head.propose

    def watched(state: Any, features: Any, next_tokens: Any, counts: torch.Tensor, *rest: Any) -> Any:
        taken.append(int(counts.max()))
        return propose(state, features, next_tokens, counts, *rest)

    monkeypatch.setattr(head, "propose", watched)
    config = TreeConfig(draft_cost=0.2, node_cost=0.02)
    assert_identical(target, head, prompts(lengths), do_sample=False, max_new_tokens=240, tree_config=config)
    stats = head.last_stats
    assert stats is not None
    assert stats.tau > 3
    assert stats.paused_rounds > 0.5 * stats.rounds
    assert len(taken) == stats.rounds - stats.paused_rounds
    apart = TreeConfig(draft_cost=0.0, node_cost=0.0, lookup=0)
    assert_identical(target, head, prompts(lengths), do_sample=False, max_new_tokens=40, tree_config=apart)
    assert head.last_stats is not None
    assert head.last_stats.paused_rounds == 0
