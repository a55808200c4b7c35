"""From a proposal to a tree: copies, selector, noise and penalties reach the trees."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
import torch
from support.trees import paths
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_dart import DartHead, TreeConfig
from hf_dart.decoding.grow import Ranker, SeenTokens, TreeGrower
from hf_dart.drafters.base import Proposal
from hf_dart.drafters.lookup import LookupDrafter
from hf_dart.trees.copies import Copies
from hf_dart.trees.tree import DraftTree


@pytest.mark.parametrize("vocabulary", [None, torch.arange(0, 48, 2)], ids=["all", "some"])
def test_a_penalty_is_for_what_each_row_holds(vocabulary: torch.Tensor | None) -> None:
    """However long the other rows are, and whichever of them grew since; ids of images may have no logit."""
    texts = [[5, 6, 7, 8, 9], [10, 12, 48, 50], [4]]
    seen, ids = SeenTokens(texts), torch.arange(48) if vocabulary is None else vocabulary
    for grown in ([], [20]), ([22, 23], []), ([24], [26, 28]):
        for row in (0, 2):
            texts[row] += grown[row // 2]
        found = seen(torch.zeros(3, 1, len(ids)), vocabulary)
        assert [set(ids[row].tolist()) for row in found] == [set(text) & set(ids.tolist()) for text in texts]


def test_the_ends_of_a_call_end_its_drafts(head: DartHead) -> None:
    """Drafted and copied; but for a row that has ended and runs on, whose pads may be end tokens."""
    logits = torch.randn(3, 4, 48, generator=torch.Generator().manual_seed(0))
    proposal = Proposal(logits, torch.zeros(3, 4, head.config.hidden_size, dtype=torch.float64))
    end = int(logits[0, 0].argmax())
    logits[1, 0, end] = logits[2, 0, end] = 9
    texts = [[5, 6, end, 7, 8, 9, 5, 6], [5, 6], [5, 6]]
    grower = TreeGrower(head, TreeConfig(nodes=60), LogitsProcessorList(), texts, torch.device("cpu"), {end, 47})
    for draft in (proposal, None):
        tree = grower(draft, None, [9, 9, 9], ended=[False, False, True])
        assert (end,) in paths(tree, 0)
        assert all(end not in path[:-1] for row in range(2) for path in paths(tree, row))
        assert all(47 not in path[:-1] for row in range(2) for path in paths(tree, row))
    tree = grower(proposal, None, [9, 9, 9], ended=[False, False, True])
    assert any(end in path[:-1] for path in paths(tree, 2))


@pytest.mark.parametrize(("chance", "wanted"), [(0.55, 7), (0.95, 5)], ids=["weak", "strong"])
def test_a_weak_copy_counts_less_beside_a_draft(head: DartHead, chance: float, wanted: int) -> None:
    """The drafter is sure of token 7 by 0.5, and token 5 is copied."""
    logits = torch.full((1, 1, 48), log(0.5 / 47))
    logits[0, 0, 7] = log(0.5)
    proposal = Proposal(logits, torch.zeros(1, 1, head.config.hidden_size, dtype=torch.float64))
    grower = TreeGrower(head, TreeConfig(nodes=2, depth=1), LogitsProcessorList(), [[3, 4]], torch.device("cpu"))
    copies = [Copies([5], [-1], [1], [log(chance)])]
    assert paths(grower(proposal, None, [1], copies=copies), 0) == {(wanted,)}
    assert paths(grower(None, None, [1], copies=copies), 0) == {(5,)}


@pytest.mark.parametrize("seed", range(40))
def test_trees_of_copies_have_the_size_that_pays(seed: int) -> None:
    """With no size given, the tokens that a round is expected to bring, over its cost, are most."""
    generator = torch.Generator().manual_seed(seed)
    tokens, batch = 3 + 60 * (seed % 2), 1 + seed % 3
    texts = [torch.randint(tokens, (14,), generator=generator).tolist() for _ in range(batch)]
    auto = TreeConfig(node_cost=0.05 + 0.1 * (seed % 4), lookup=8)

    def grown(config: TreeConfig) -> DraftTree:
        grower = TreeGrower(LookupDrafter(config), config, [], texts, torch.device("cpu"))  # type: ignore[arg-type]
        return grower(None, None, [6] * batch)

    def rate(tree: DraftTree) -> float:
        assert tree.scores is not None
        return float(tree.scores.exp().sum(1).mean()) / auto.round_cost(batch, "cpu", False).of(tree.size)

    tree = grown(auto)
    assert tree.max_depth <= 6
    assert rate(tree) == pytest.approx(max(rate(grown(replace(auto, nodes=size))) for size in range(1, 32)))
    assert tree.size > 1 or seed % 4  # copies of few tokens, and cheap nodes


FILTERS = {
    "none": [],
    "top-k": [TopKLogitsWarper(5)],
    "top-p": [TopPLogitsWarper(0.6)],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.3)],
    "both": [TemperatureLogitsWarper(0.7), TopKLogitsWarper(8), TopPLogitsWarper(0.7)],
}


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("spread", [1.0, 1000.0], ids=["open", "sure"])
def test_candidates_are_ranked_behind_stocks_filters(filters: list[LogitsProcessor], spread: float) -> None:
    """However sure the draft is of one token, the noise may choose another of those that are kept."""
    generator = torch.Generator().manual_seed(0)
    logits, uniform = spread * torch.randn(2, 3, 48, generator=generator), torch.rand(2, 3, 48, generator=generator)
    gumbel, ranker = -(-uniform.log()).log(), Ranker(LogitsProcessorList(filters), 6)
    ids = torch.arange(40).view(2, 20)
    seen = torch.zeros(2, 48, dtype=torch.bool).scatter(1, ids, True) if ranker.needs_history else None
    kept = [LogitsProcessorList(filters)(ids, each) for each in logits.unbind(1)]
    wanted = (torch.stack(kept, dim=1) + gumbel).log_softmax(-1)
    torch.testing.assert_close(ranker.scores(logits, gumbel, seen), wanted)
    tokens, scores = ranker(logits, gumbel, seen)
    best = wanted.topk(scores.shape[-1])
    torch.testing.assert_close(scores, best.values)
    assert torch.equal(tokens[scores.isfinite()], best.indices[scores.isfinite()])
    assert (wanted.isfinite().sum(-1) <= scores.shape[-1]).all() or scores.shape[-1] == 6
