"""One node budget for all rows of a batch: which nodes are kept, and that the target runs over no others."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import batch
from support.compare import assert_identical
from support.engines import SIMULATED
from support.tiny import prompts, tiny_head, tiny_target
from support.trees import candidates_of

import hf_dart
from hf_dart import TreeConfig
from hf_dart.drafters.proposal import Proposal
from hf_dart.engine.attention import MASKS, NODES
from hf_dart.engine.budget import computed, shared
from hf_dart.trees.in_tensors import grow_in_tensors
from hf_dart.trees.tree import DraftTree

pytestmark = pytest.mark.filterwarnings("error::UserWarning")
GREEDY = {"do_sample": False, "max_new_tokens": 30}
ENDS = {"eos_token_id": [3, 11, 19, 27], "pad_token_id": 0}
TREE = TreeConfig(nodes=6, lookup=0)


def engine(target: Any, head: Any, **options: Any) -> Any:
    return hf_dart.compile(target, head, **{"backend": None, "first_tier": 64, **options})


def path(tree: DraftTree, row: int, node: int) -> tuple[int, ...]:
    """The tokens from the root to a node."""
    tokens: list[int] = []
    while node >= 0:
        tokens.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return tuple(reversed(tokens))


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 4), budget=st.integers(4, 40), seed=st.integers(0, 2**31))
def test_the_likeliest_nodes_of_all_rows(rows: int, budget: int, seed: int) -> None:
    """By a plain sort of all paths; those of rows that do not run are left out, their roots too."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn((rows, 3, 4), generator=generator).mul(3).log_softmax(-1).sort(-1, descending=True).values
    tokens = torch.arange(12).view(1, 3, 4).expand(rows, -1, -1)
    roots = torch.arange(rows)[:, None] + 100
    deepest = torch.randint(0, 4, (rows,), generator=generator)
    candidates = candidates_of(tokens, scores, history=roots, deepest=deepest.tolist())
    tree = grow_in_tensors(candidates, nodes=13, beam=4).padded(16)
    running = torch.rand(rows, generator=generator) < 0.7
    running[0] = True
    assert tree.scores is not None
    every = [
        (float(tree.scores[row, node]) if node else torch.inf, row, node)
        for row in range(rows)
        for node in range(16)
        if running[row] and tree.scores[row, node] > -torch.inf
    ]
    every.sort(key=lambda one: -one[0])
    wanted = {(row, path(tree, row, node)) for _, row, node in every[:budget]}
    kept = shared(tree, running, budget)
    real = [(row, node) for row in range(rows) for node in range(16) if kept.parents[row, node] >= 0]
    real += [(row, 0) for row in range(rows) if running[row]]
    assert {(row, path(kept, row, node)) for row, node in real} == wanted
    again = DraftTree.from_parents(kept.tokens, kept.parents, max_depth=3)
    assert torch.equal(again.ancestors, kept.ancestors)
    assert torch.equal(again.depths, kept.depths)
    size = min(budget, rows * 16)
    places = computed(kept, running, size).tolist()
    assert len(set(places)) == size
    assert {row * 16 + node for row, node in real} <= set(places)


def test_what_the_target_runs_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many nodes as all rows have a right to, though some end; the text is stock's."""
    target = tiny_target("qwen3")
    head = tiny_head(target)
    engine(target, head)
    inputs = prompts([9, 3, 7, 13, 5], seed=2)
    sizes: list[int] = []
    embed = target.model.embed_tokens.forward

    def counted(ids: Any) -> Any:
        if len(ids) == 1:
            sizes.append(ids.shape[1])
        return embed(ids)

    monkeypatch.setattr(target.model.embed_tokens, "forward", counted)
    assert_identical(target, head, inputs, tree_config=TREE, **GREEDY, **ENDS)  # tries what the target has become
    sizes.clear()
    assert_identical(target, head, inputs, tree_config=TREE, **GREEDY, **ENDS)
    assert set(sizes) == {32}  # 5 rows of 6
    assert any(0 in counts for counts in head.last_stats.committed)


class OneSureRow(SIMULATED.SimulatedHead):
    """Right and sure of it in the first row; in the others any token is as good as another."""

    def propose(self, *args: Any, **kwargs: Any) -> Proposal:
        proposal = super().propose(*args, **kwargs)
        first = torch.arange(len(proposal.logits))[:, None, None] == 0
        return Proposal(torch.where(first, proposal.logits, 0.0), proposal.hidden)


def test_nodes_go_where_they_are_worth_most() -> None:
    target = SIMULATED.build_target("tiny", torch.float32, torch.device("cpu"))
    head = OneSureRow.from_target(target, draft_length=8).aim(9)
    longest = []
    for share in (1, 3):
        engine(target, head, share=share)
        options = {"do_sample": False, "max_new_tokens": 28, "tree_config": TreeConfig(nodes=4, lookup=0)}
        assert_identical(target, head, prompts([5, 9]), **options)
        longest.append([max(counts) for counts in zip(*head.last_stats.committed, strict=True)])
    assert longest == [[4, 1], [7, 1]], "of 8 nodes, a root for either row and 6 for the first"


@pytest.mark.parametrize("family", ["gemma3", "gpt2", pytest.param("qwen3_moe", marks=pytest.mark.matrix)])
def test_families(family: str) -> None:
    target = tiny_target(family)
    head = tiny_head(target)
    made = engine(target, head)
    assert_identical(target, head, batch(4, "sdpa"), tree_config=TREE, **GREEDY, **ENDS)
    assert all(one.shape.budget for one in made.tiers)


def test_targets_whose_trees_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as attend by other means than SDPA, or do not hand down what they do not know; without a warning."""
    for attention in ("eager", "sdpa"):
        target = tiny_target("llama", attention)
        head = tiny_head(target)
        told: list[str] = []
        made = engine(target, head, progress=told.append)
        if attention == "sdpa":
            layer = type(target.model.layers[0])
            forward = layer.forward

            def deaf(self: Any, *args: Any, forward: Any = forward, **kwargs: Any) -> Any:
                for name in (NODES, MASKS):
                    kwargs.pop(name, None)
                return forward(self, *args, **kwargs)

            monkeypatch.setattr(layer, "forward", deaf)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_identical(target, head, batch(4, attention), tree_config=TREE, **GREEDY)
        assert [one.shape.budget for one in made.tiers] == [None]
        assert any("do not share" in line for line in told) == (attention == "sdpa")


@pytest.mark.parametrize(
    ("costs", "budget"), [(((1, 1), (32, 1.1)), 64), (((1, 1), (4, 1.1), (32, 20.0)), 8), ((), 16)]
)
def test_as_many_nodes_as_their_cost_is_worth(costs: Any, budget: int) -> None:
    """By what rounds cost where that was measured, else by what a CPU's are taken to cost; a given number stays."""
    target = tiny_target("qwen3")
    head = tiny_head(target)
    made = engine(target, head)
    for nodes, wanted in ((None, budget), (7, 32)):
        head.tree_config = TreeConfig(nodes=nodes, verify_costs=costs, lookup=0)
        assert_identical(target, head, batch(4, "sdpa"), **GREEDY)
        assert made.tiers[-1].shape.budget == wanted
