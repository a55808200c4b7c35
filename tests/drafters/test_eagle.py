"""EAGLE heads: exact like every drafter, drafted as they are trained, and rolled out token by token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.heads import assert_beam, draft_after, features_of
from support.sentences import refused
from support.tiny import prompts, tiny_eagle_drafter, tiny_target

from hf_dart import EagleDrafter, TreeConfig
from hf_dart.drafters.eagle.drafter import EagleConfig
from hf_dart.training.objective.blocks import build_blocks


@pytest.fixture(scope="module")
def llama() -> tuple[Any, EagleDrafter]:
    target = tiny_target("llama")
    return target, tiny_eagle_drafter(target)


@torch.no_grad()
@pytest.mark.parametrize("noisy", [False, True])
def test_a_branch_is_what_the_training_pass_sees(llama: tuple[Any, EagleDrafter], noisy: bool) -> None:
    """The caches, masks and positions of the beam against one plain pass over each path."""
    target, drafter = llama
    ids = prompts([9])["input_ids"]
    depth = drafter.draft_length
    noise = -torch.empty(depth, 48).exponential_(generator=torch.Generator().manual_seed(0)).log()
    features = features_of(target, drafter.feature_layers, ids)

    def scored(level: int, chances: torch.Tensor) -> torch.Tensor:
        return (chances + noise[level]).log_softmax(-1) if noisy else chances

    def after(path: list[int]) -> torch.Tensor:
        """Log-probabilities [V] after a path, by the training pass over a whole block that begins with it."""
        level, path = len(path), path + [0] * (depth - 1 - len(path))
        tokens = torch.cat([ids, torch.tensor([path])], dim=1)
        documents, anchors = torch.zeros_like(tokens), torch.tensor([[ids.shape[1] - 2]])
        blocks = build_blocks(documents[:, : ids.shape[1]], anchors, depth)
        states = drafter(
            features=features,
            next_embeddings=drafter.embed(ids[:, 1:]),
            drafted_embeddings=drafter.embed(torch.tensor([[path]])),
            anchors=anchors,
            positions=blocks.positions,
            attention_mask=blocks.mask,
        )
        return drafter.logits(states)[0, 0, level].float().log_softmax(-1)

    assert_beam(draft_after(target, drafter, ids, score=scored), 0, after, scored)


class BlindDrafter(EagleDrafter):
    """Drafts on from the likeliest tokens, whatever the target's noise is."""

    def propose_ranked(self, *args: Any) -> Any:
        return super().propose_ranked(*args[:-1], lambda _, logits: logits)


def test_branches_see_the_noise(llama: tuple[Any, EagleDrafter]) -> None:
    """At T = 1 more is accepted where tokens are drafted on from that the target will draw; the text is the same."""
    target, drafter = llama
    blind = copy.deepcopy(drafter)
    blind.__class__ = BlindDrafter
    options = {"do_sample": True, "max_new_tokens": 48, "tree_config": TreeConfig(nodes=16, lookup=0)}
    written, taus = [], []
    for one in (drafter, blind):
        torch.manual_seed(3)
        written.append(target.generate(**prompts([5, 7, 9, 6]), assistant=one, **options))
        taus.append(one.last_stats.tau)
    assert torch.equal(*written)
    assert taus[0] > taus[1] + 0.1, taus


@torch.no_grad()
def test_trees_follow_the_branches(llama: tuple[Any, EagleDrafter]) -> None:
    target, drafter = llama
    proposal = draft_after(target, drafter, prompts([9])["input_ids"])
    scores, candidates = proposal.logits.log_softmax(-1).topk(6)
    table = drafter.transitions(proposal, torch.tensor([3]), candidates, scores)
    assert torch.equal(table[:, 0], scores[:, 0, None].expand(-1, 6, -1))
    for level in range(1, drafter.draft_length):
        together = scores[0, level].exp().sum()
        for place, token in enumerate(candidates[0, level - 1].tolist()):
            branch = (proposal.branches[0, level - 1] == token).nonzero()
            if not len(branch):
                assert bool((table[0, level, place] == -torch.inf).all())
                continue
            chances = proposal.conditional[0, level - 1, int(branch[0])][candidates[0, level]].exp()
            expected = chances / chances.sum() * together
            assert torch.allclose(table[0, level, place].exp(), expected, atol=1e-5)
    proposal.force_token([True], 5)  # as of a row that has ended
    scores, candidates = proposal.logits.log_softmax(-1).topk(6)
    table = drafter.transitions(proposal, torch.tensor([3]), candidates, scores)
    assert torch.allclose(table[0, 1:, 0, 0].exp(), torch.ones(drafter.draft_length - 1))


def test_what_belongs_to_dart_heads_is_refused() -> None:
    refused(lambda: EagleConfig(selector_rank=4), ValueError, "has no selector_rank")
    refused(lambda: EagleConfig(beam=0), ValueError, "beam is 0")
