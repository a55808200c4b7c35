"""Pauses and chains where drafts bring less than they cost: when they come, and that they change no token."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch
from support.compare import assert_identical
from support.tiny import prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target

from hf_dart import TreeConfig
from hf_dart.decoding.drafter_runner import joined
from hf_dart.decoding.pace import Pace, headway, shares
from hf_dart.decoding.proposal import Verified
from hf_dart.drafters.cost import _CALL
from hf_dart.drafters.lookup import LookupDrafter


def rounds(pace: Pace, count: int, emitted: list[int], nodes: int) -> list[bool]:
    """Play rounds; which of them were drafted."""
    drafted = []
    for _ in range(count):
        drafted.append(pace.drafting)
        pace.count(emitted if pace.drafting else [min(1, tokens) for tokens in emitted], [50] * len(emitted), nodes)
    return drafted


def levels(pace: Pace, count: int, emitted: dict[str, int], nodes: int) -> list[tuple[str, int]]:
    """Play rounds of one row that bring so many tokens at each level; the levels, and for how many rounds each held."""
    played = []
    for _ in range(count):
        played.append(pace.level)
        pace.count([emitted[pace.level]], [50], nodes)
    return [(level, len(list(same))) for level, same in groupby(played)]


CHAINS = TreeConfig(draft_cost=0.3, refine=1)  # where a chain spares a second look at the draft


def test_drafts_that_do_not_pay_pause_longer_and_longer() -> None:
    found = levels(Pace(TreeConfig(draft_cost=0.3, node_cost=0.0), "cpu"), 1900, {"tree": 1, "pause": 1}, nodes=6)
    assert found[:8] == [
        ("tree", 8),
        ("pause", 48),
        ("tree", 4),
        ("pause", 192),
        ("tree", 4),
        ("pause", 768),
        ("tree", 4),
        ("pause", 768),
    ]
    found = levels(Pace(CHAINS, "cpu"), 900, {"tree": 1, "chain": 1, "pause": 1}, nodes=2)
    assert found[:5] == [("tree", 5), ("chain", 4), ("pause", 48), ("chain", 4), ("pause", 192)]


def test_a_trial_loses_no_more_than_its_stake() -> None:
    for draft, rows, trials in ((1.0, 1, (3, 2)), (1.0, 4, (2, 1)), (0.5, 4, (3, 2)), (0.1, 4, (8, 4))):
        pace = Pace(TreeConfig(draft_cost=draft, node_cost=0.0), "cpu")
        played = rounds(pace, 100, [1] * rows, nodes=1)
        found = [(drafted, len(list(same))) for drafted, same in groupby(played)]
        assert found[:3] == [(True, trials[0]), (False, 48), (True, trials[1])]


def test_a_chain_where_a_tree_does_not_pay() -> None:
    found = levels(Pace(CHAINS, "cpu"), 300, {"tree": 1, "chain": 2, "pause": 1}, nodes=2)
    assert found[:5] == [("tree", 5), ("chain", 48), ("tree", 3), ("chain", 192), ("tree", 3)]


def test_back_to_a_tree_when_the_text_gets_easier() -> None:
    pace = Pace(CHAINS, "cpu")
    assert levels(pace, 57, {"tree": 1, "chain": 1, "pause": 1}, nodes=2)[-1] == ("pause", 48)
    assert levels(pace, 100, {"tree": 3, "chain": 2, "pause": 1}, nodes=2) == [("chain", 4), ("tree", 96)]


def test_what_a_row_counts_for() -> None:
    """Shares are the slope of headway, which lies between the slowest row's tokens and the mean."""
    emitted, limits = [30, 34, 90, 7], [9, 9, 9, 0]
    parts = shares(emitted, limits)
    assert sum(parts) == pytest.approx(1)
    assert parts[0] > parts[1] > 100 * parts[2] > parts[3] == 0, "who has ended, or is far ahead, does not count"
    assert shares([5, 5], [9, 9]) == [0.5, 0.5]
    assert shares([5, 6], [0, 0]) == [0.0, 0.0]
    for tokens in (1, 7):
        assert headway(emitted, [tokens] * 3 + [0], limits) == pytest.approx(tokens)
    assert headway([3], [17], [20]) == 17
    assert 1 < headway([0, 0], [1, 5], [9, 9]) < 3
    assert headway([0, 5000], [1, 9], [9, 9]) == 1
    more = headway(emitted, [1, 2, 1, 0], limits) - headway(emitted, [1, 1, 1, 0], limits)
    assert more == pytest.approx(parts[1], rel=0.1)
    # Round by round it adds up to the growth over all of them.
    whole = headway([0, 0], [4, 9], [9, 9])
    assert headway([0, 0], [3, 1], [9, 9]) + headway([3, 1], [1, 8], [9, 9]) == pytest.approx(whole)


def test_drafts_that_the_slowest_row_has_nothing_of_do_not_pay() -> None:
    config = TreeConfig(draft_cost=0.3, node_cost=0.0)
    assert not all(rounds(Pace(config, "cpu"), 40, [1, 3], 4)), "the mean of both rows is 2"
    assert all(rounds(Pace(config, "cpu"), 40, [2, 3], 4))
    turns = Pace(config, "cpu")
    for number in range(40):
        assert turns.drafting, "each is ahead in its turn"
        turns.count([1, 3] if number % 2 else [3, 1], [50, 50], 4)


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
        assert all(rounds(Pace(config, "cpu"), 50, emitted, nodes))
    assert not all(rounds(Pace(TreeConfig(draft_cost=0.3, node_cost=0.1), "cpu"), 50, [2, 2], 5))
    assert all(rounds(Pace(TreeConfig(), "cuda"), 50, [2, 2], 64)), "where nodes cost nothing, they are not charged"


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
