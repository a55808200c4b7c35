"""Draft logits by a low-rank LM head: against plain references, and the text stays stock's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import batch
from support.compare import assert_identical
from support.tiny import tiny_head, tiny_target

import hf_dart
from hf_dart import LookupDrafter, TreeConfig
from hf_dart.bench.draft_methods import of_ranks
from hf_dart.drafters.dart import low_rank
from hf_dart.drafters.dart.low_rank import Factors

GREEDY = {"do_sample": False, "max_new_tokens": 20, "tree_config": TreeConfig(nodes=8, lookup=0)}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rank", [1, 5, 12])
def test_the_best_of_that_rank(rank: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a plain singular value decomposition has it; at full rank it is the LM head. The best tokens are exact."""
    weight, hidden = normal(300, 12), normal(2, 3, 12, seed=1)
    bias = normal(300, seed=2) if biased else None
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    near = (left[:, :rank] * values[:rank]) @ right[:rank]
    wanted = torch.nn.functional.linear(hidden, near, bias)
    whole = torch.nn.functional.linear(hidden, weight, bias)
    made = Factors.of(weight, bias, rank)
    assert made.up.shape == (300, rank)
    assert made.down.shape == (rank, 12)
    monkeypatch.setattr(low_rank, "EXACT", 0)
    torch.testing.assert_close(made.logits(hidden), wanted)
    monkeypatch.setattr(low_rank, "EXACT", 7)
    best = wanted.topk(7).indices
    torch.testing.assert_close(made.logits(hidden), wanted.scatter(-1, best, whole.gather(-1, best)))
    if rank == 12:
        torch.testing.assert_close(made.logits(hidden), whole)


@pytest.mark.parametrize("backend", [None, pytest.param("eager", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("kind", ["all", "some", "own"])
def test_drafts(kind: str, backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At full rank the draft is the head's; at any rank the text is stock's, by the eager and the captured round."""
    monkeypatch.setattr(low_rank, "EXACT", 4)
    target = tiny_target("llama")
    head = tiny_head(target, own_lm_head=kind == "own")
    if kind == "some":
        head.reduce_vocabulary(range(2, 40))
    hidden = normal(2, 5, head.config.hidden_size)
    wanted = head.logits(hidden)
    head.reduce_rank(head.config.hidden_size)
    torch.testing.assert_close(head.draft_logits(hidden), wanted)
    head.reduce_rank(2)
    low = head.draft_logits(hidden)
    assert low.shape == wanted.shape
    assert not torch.allclose(low, wanted)
    assert_identical(target, head, batch(4, "sdpa"), **GREEDY)
    hf_dart.compile(target, head, backend=backend, first_tier=64)
    assert_identical(target, head, batch(4, "sdpa"), **GREEDY)
    head.reduce_rank(None)
    assert torch.equal(head.draft_logits(hidden), wanted)


def test_weights_that_change() -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    hidden = normal(1, 2, head.config.hidden_size)
    rank = head.config.hidden_size
    before = head.reduce_rank(rank).draft_logits(hidden)
    with torch.no_grad():
        target.lm_head.weight.mul_(2)
    torch.testing.assert_close(head.draft_logits(hidden), 2 * before)
    made: Any = hf_dart.compile(target, head, backend=None, first_tier=64)
    assert_identical(target, head, batch(1, "sdpa"), **GREEDY)
    (tier,) = made.tiers
    assert_identical(target, head.reduce_rank(3), batch(1, "sdpa"), **GREEDY)
    assert tier not in made.tiers


@pytest.mark.parametrize("rank", [0, 4096])
def test_mistakes(rank: int) -> None:
    head = tiny_head(tiny_target("llama"))
    with pytest.raises(ValueError, match=f"rank is {rank}; give 1 to"):
        head.reduce_rank(rank)
    assert head.draft_rank is None


def test_ranks_side_by_side() -> None:
    """As `hf-dart drafts --ranks` compares them: each with factors of its own, and the head as it was."""
    target = tiny_target("llama")
    head = tiny_head(target)
    ways = of_ranks(head, (2, 5), nodes=8)
    assert list(ways) == ["marginal tree, rank 2", "marginal tree, rank 5"]
    rows, width = target.lm_head.weight.shape
    for way, rank in zip(ways.values(), (2, 5), strict=True):
        assert_identical(target, way.drafter, batch(1, "sdpa"), do_sample=False, max_new_tokens=6, tree_config=way.tree)
        made = way.drafter._low_rank._made
        assert made is not None
        assert sum(part.nbytes for part in made[2][:2]) == way.describe()["bytes"] == rank * (rows + width) * 8
    assert head.draft_rank is None
    with pytest.raises(ValueError, match="this is a LookupDrafter"):
        of_ranks(LookupDrafter(), (2,), nodes=8)
