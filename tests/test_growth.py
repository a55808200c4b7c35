"""Trees grown on the host: the same nodes as the tensor path's, no more than are worth it, and pauses."""

from __future__ import annotations

from itertools import groupby
from math import exp, inf
from random import Random

import numpy as np
import pytest
import torch
from support.compare import assert_identical
from support.tiny import prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from hf_dart import TreeConfig
from hf_dart.decoding.drafting import joined
from hf_dart.decoding.grow import TreeGrower
from hf_dart.decoding.pace import Pace, headway, shares
from hf_dart.decoding.proposer import Proposal
from hf_dart.drafters.lookup import LookupDrafter
from hf_dart.drafters.pretrained import _CALL
from hf_dart.trees.best_first import RowDraft, best_first
from hf_dart.trees.by_depth import Drafts, by_depth
from hf_dart.trees.costs import RoundCost
from hf_dart.trees.tree import DraftTree, Transitions, grow_tree

Path = tuple[int, ...]


def paths(tree: DraftTree, row: int) -> set[Path]:
    """The drafted tokens from the root to each real node, by the ancestor masks."""
    real = (tree.parents[row] >= 0).nonzero().flatten().tolist()
    return {tuple(tree.tokens[row][tree.ancestors[row, node]].tolist()[1:]) for node in real}


def random_draft(batch: int, depth: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Candidates [B, d, K], distinct within a depth, and transitions [B, d, K, K]."""
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.rand(batch, depth, 50, generator=generator).argsort(-1)[..., :width]
    table = (2 * torch.randn(batch, depth, width, width, generator=generator)).log_softmax(-1)
    table[:, 0] = table[:, 0, :1]  # the root is in front of the first
    return candidates, table


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("depth", "width", "nodes"), [(1, 6, 4), (3, 4, 12), (4, 3, 30), (5, 2, 9), (3, 3, 200)])
def test_grows_the_nodes_of_the_tensor_path(depth: int, width: int, nodes: int, seed: int) -> None:
    candidates, table = random_draft(3, depth, width, seed)
    limits = [depth, max(1, depth - 1), 0]
    roots = [7, 8, 9]
    drafts = [
        RowDraft(root, tokens, pairs, limit)
        for root, tokens, pairs, limit in zip(roots, candidates.tolist(), table.tolist(), limits, strict=True)
    ]
    found = best_first(drafts, nodes=nodes)
    wanted = grow_tree(
        torch.tensor(roots)[:, None],
        candidates,
        table[:, :, 0],
        nodes=nodes,
        beam=width**depth,  # no beam at all
        depth_limit=torch.tensor(limits),
        scorer=Transitions(table),
    )
    for row in range(3):
        assert paths(found, row) == paths(wanted, row)
    again = DraftTree.from_parents(found.tokens, found.parents, depth)
    assert torch.equal(found.depths, again.depths)
    assert torch.equal(found.ancestors, again.ancestors)
    assert found.max_depth == int(found.depths.max())


@pytest.mark.parametrize("penalty", [None, 1.3])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("rank", [0, 4])
def test_both_ways_from_a_proposal(rank: int, noisy: bool, penalty: float | None) -> None:
    """Copies, selector, noise and penalty reach the host's trees as they reach the device's."""
    target = tiny_target("qwen3")
    head = tiny_head(target, selector_rank=rank)
    generator = torch.Generator().manual_seed(3)
    if rank:
        with torch.no_grad():
            for weight in head.selector.parameters():
                weight.add_(torch.randn(weight.shape, dtype=weight.dtype, generator=generator))
    random = Random(1)
    text = [random.randrange(3, 40) for _ in range(9)]
    texts = [[*text, *text[:4]], [random.randrange(3, 40) for _ in range(6)], [5, 6, 5, 6, 5, 6, 5]]
    proposal = Proposal(
        torch.randn(3, 4, 48, dtype=torch.float64, generator=generator),
        torch.randn(3, 4, head.config.hidden_size, dtype=torch.float64, generator=generator),
    )
    gumbel = -torch.empty(3, 4, 48).exponential_(1, generator=generator).log() if noisy else None
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)] if penalty else [])
    config = TreeConfig(nodes=25, depth=4, top_k=5, beam=10**6, lookup=7)
    found = []
    for way in ("_on_host", "_on_device"):
        grower = TreeGrower(head, config, processors, texts, torch.device("cpu"))
        for other in {"_on_host", "_on_device"} - {way}:
            setattr(grower, other, getattr(grower, way))
        tree = grower(proposal, gumbel, [9, 3, 9])
        found.append([paths(tree, row) for row in range(3)])
    assert found[0] == found[1]
    assert max(map(len, found[0][0])) > 4, "a copy goes deeper than the drafter"
    assert max(map(len, found[0][1])) <= 3


def test_no_node_that_costs_more_than_it_brings() -> None:
    """The size is the one that maximises expected tokens per cost, found here by trying every size."""
    shrunk = 0
    for seed in range(20):
        candidates, table = random_draft(2, 3, 4, seed)
        lists = zip(candidates.tolist(), table.tolist(), strict=True)
        drafts = [RowDraft(1, tokens, pairs, 3) for tokens, pairs in lists]
        cost, draft_cost = 0.02 + 0.01 * seed, 0.1 * (seed % 5)
        rates = []
        for nodes in range(1, 21):
            tree = best_first(drafts, nodes=nodes)
            expected = 2.0
            for row, draft in enumerate(drafts):
                for path in paths(tree, row):
                    columns = [draft.candidates[depth].index(token) for depth, token in enumerate(path)]
                    steps = zip(draft.table, [0, *columns], columns, strict=False)
                    expected += exp(sum(min(pairs[front][column], -1e-4) for pairs, front, column in steps))
            rates.append(expected / (1 + draft_cost + 2 * cost * (nodes - 1)))
        size = best_first(drafts, nodes=20, cost=RoundCost.linear(draft_cost, cost, 2)).size
        assert rates[size - 1] == pytest.approx(max(rates), rel=1e-9)
        shrunk += size < 20
    assert shrunk > 10


def test_nothing_to_grow() -> None:
    tree = best_first([RowDraft(5, [[1, 2]], [[[-1.0, -2.0]]], -1), RowDraft(6, [[-1]], [[[-1.0]]], 1)], nodes=8)
    assert tree.tokens.tolist() == [[5], [6]]
    assert tree.max_depth == 0
    copied = best_first([RowDraft(5, [[1]], [[[-inf]]], 4, copied=[1, 2, 3], log_chance=-0.1)], nodes=8)
    assert paths(copied, 0) == {(1,), (1, 2), (1, 2, 3)}


# ---- pauses -----------------------------------------------------------------------------------------------


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
    found = levels(Pace(TreeConfig(draft_cost=0.3, node_cost=0.0), "cpu"), 900, {"tree": 1, "pause": 1}, nodes=6)
    assert found[:8] == [("tree", 8), ("pause", 48), ("tree", 4), ("pause", 96), ("tree", 4), ("pause", 192),
                         ("tree", 4), ("pause", 384)]
    found = levels(Pace(CHAINS, "cpu"), 900, {"tree": 1, "chain": 1, "pause": 1}, nodes=2)
    assert found[:5] == [("tree", 5), ("chain", 4), ("pause", 48), ("chain", 4), ("pause", 96)]


def test_a_trial_loses_no_more_than_its_stake() -> None:
    for draft, rows, trials in ((1.0, 1, (3, 2)), (1.0, 4, (2, 1)), (0.5, 4, (3, 2)), (0.1, 4, (8, 4))):
        pace = Pace(TreeConfig(draft_cost=draft, node_cost=0.0), "cpu")
        played = rounds(pace, 100, [1] * rows, nodes=1)
        found = [(drafted, len(list(same))) for drafted, same in groupby(played)]
        assert found[:3] == [(True, trials[0]), (False, 48), (True, trials[1])]


def test_a_chain_where_a_tree_does_not_pay() -> None:
    found = levels(Pace(CHAINS, "cpu"), 300, {"tree": 1, "chain": 2, "pause": 1}, nodes=2)
    assert found[:5] == [("tree", 5), ("chain", 48), ("tree", 3), ("chain", 96), ("tree", 3)]


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


@pytest.mark.parametrize("context", [False, True], ids=["best first", "by depth"])
def test_trees_grow_for_the_rows_that_count(context: bool) -> None:
    """One row's draft is sure, the other's is not: nodes are worth their cost if the sure row is not far ahead."""
    sure, unsure = [[-0.05, -5.0]], [[-5.0, -6.0]]
    cost = RoundCost.linear(0.0, 0.05, 2)
    for parts, size in (([0.5, 0.5], 2), ([1.0, 0.0], 2), ([0.02, 0.98], 1), (None, 2)):
        if context:
            history, tokens = np.array([[1], [2]]), np.array([[[3, 4]], [[3, 4]]])
            none = np.empty((2, 0))
            drafts = Drafts(history, tokens, lambda *_: np.array([sure, unsure]), [1, 1], none, none)
            tree = by_depth(drafts, nodes=4, beam=4, cost=cost, shares=parts)
        else:
            rows = [RowDraft(1, [[3, 4]], [sure], 1), RowDraft(2, [[3, 4]], [unsure], 1)]
            tree = best_first(rows, nodes=4, cost=cost, shares=parts)
        assert tree.size == size


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
    assert alone.lent_weights == 0
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


@pytest.mark.parametrize("way", ["_on_host", "_on_device"])
def test_a_chain_is_the_likeliest_token_of_each_depth(way: str) -> None:
    head = tiny_head(tiny_target("llama"), selector_rank=4)
    logits = torch.randn(2, 4, 48, generator=torch.Generator().manual_seed(0))
    proposal = Proposal(logits, torch.zeros(2, 4, head.config.hidden_size, dtype=torch.float64))
    config = TreeConfig(nodes=25, depth=4, top_k=5, lookup=0)
    grower = TreeGrower(head, config, LogitsProcessorList(), [[7], [8]], torch.device("cpu"))
    for other in {"_on_host", "_on_device"} - {way}:
        setattr(grower, other, getattr(grower, way))
    with torch.no_grad():
        tree = grower(proposal, None, [9, 2], chain=True)
    best = logits.argmax(-1).tolist()
    assert tree.size == 5
    for row, deepest in enumerate((4, 2)):
        assert paths(tree, row) == {tuple(best[row][:depth]) for depth in range(1, deepest + 1)}


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
    if keeps:  # what was not drafted behind is taken in by the next turn
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
        chunks.append((tokens[..., None] * torch.tensor([1.0, 0.5]), tokens, torch.tensor(counts)))
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
