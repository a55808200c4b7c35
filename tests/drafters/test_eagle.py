"""EAGLE heads: exact like every drafter, drafted as they are trained, and rolled out token by token."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_training
from support.compare import assert_identical
from support.tiny import prompts, tiny_eagle_drafter, tiny_target

from hf_dart import EagleDrafter, TreeConfig, load_drafter
from hf_dart.drafters.beams import BeamProposal
from hf_dart.drafters.eagle.configuration import EagleConfig
from hf_dart.models.verify import features_request, gather_features
from hf_dart.training import EagleTrainer
from hf_dart.training.objective.blocks import build_blocks


@pytest.fixture(scope="module")
def llama() -> tuple[Any, EagleDrafter]:
    target = tiny_target("llama")
    return target, tiny_eagle_drafter(target)


def draft_behind(
    target: Any, drafter: EagleDrafter, ids: torch.Tensor, noise: torch.Tensor | None = None
) -> tuple[torch.Tensor, BeamProposal]:
    """Features [1, T - 1, F] and the draft after the text `ids` [1, T], taken in by two calls.

    `noise` [d, V] is that of the target.
    """
    outputs = target(input_ids=ids[:, :-1], use_cache=False, **features_request(drafter.feature_layers))
    features = gather_features(outputs, drafter.feature_layers, ids[:, :-1])
    state = drafter.begin(1, 4)
    drafter.extend(state, features[:, :3], ids[:, 1:4], torch.tensor([3]))
    last = (state, features[:, 3:], ids[:, 4:], torch.tensor([features.shape[1] - 3]))
    if noise is None:
        proposal = drafter.propose(*last)
    else:
        proposal = drafter.propose_ranked(*last, None, lambda level, logits: (logits + noise[level]).log_softmax(-1))
    assert isinstance(proposal, BeamProposal)
    return features, proposal


@torch.no_grad()
@pytest.mark.parametrize("noisy", [False, True])
def test_a_branch_is_what_the_training_pass_sees(llama: tuple[Any, EagleDrafter], noisy: bool) -> None:
    """The caches, masks and positions of the beam against one plain pass over each path."""
    target, drafter = llama
    ids = prompts([9])["input_ids"]
    depth, width = drafter.draft_length, drafter.beam
    noise = -torch.empty(depth, 48).exponential_(generator=torch.Generator().manual_seed(0)).log()
    features, proposal = draft_behind(target, drafter, ids, noise if noisy else None)

    def scored(level: int, chances: torch.Tensor) -> torch.Tensor:
        return (chances + noise[level]).log_softmax(-1) if noisy else chances

    def behind(path: list[int]) -> torch.Tensor:
        """Log-probabilities [d, V] after 0, 1, ... tokens of a path of d - 1."""
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
        return drafter.logits(states)[0, 0].float().log_softmax(-1)

    known = behind([0] * (depth - 1))[0]
    assert torch.allclose(known, proposal.logits[0, 0], atol=1e-5)
    assert proposal.branches[0, 0].tolist() == scored(0, known).topk(width).indices.tolist()
    # Paths of the beam, followed from the first branches on by the best way to each token.
    paths = [([token], float(scored(0, known)[token])) for token in proposal.branches[0, 0].tolist()]
    for level in range(depth - 1):
        marginal = torch.zeros_like(known)
        found: dict[int, tuple[list[int], float]] = {}
        for place, (path, score) in enumerate(paths):
            assert path[-1] == proposal.branches[0, level, place]
            expected = behind(path + [0] * (depth - 1 - len(path)))[level + 1]
            assert torch.allclose(expected, proposal.conditional[0, level, place], atol=1e-5)
            marginal += (score + expected).exp()
            for token, chance in enumerate((score + scored(level + 1, expected)).tolist()):
                if token not in found or chance > found[token][1]:
                    found[token] = ([*path, token], chance)
        assert torch.allclose(marginal.log(), proposal.logits[0, level + 1], atol=1e-5)
        paths = sorted(found.values(), key=lambda path: -path[1])[:width]


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
    _, proposal = draft_behind(target, drafter, prompts([9])["input_ids"])
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


def test_training_teaches_it_to_draft(tmp_path: Path) -> None:
    target = tiny_training.tiny_target()
    drafter = EagleDrafter.from_target(target, feature_layers=[0, 2, 3], draft_length=4)
    rows = tiny_training.token_rows(tiny_training.LENGTHS)
    options = {"max_steps": 16, "per_device_train_batch_size": 3}
    trainer = tiny_training.tiny_trainer(tmp_path / "run", drafter, target, rows, rows, EagleTrainer, **options)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.8 * before["eval_loss"]
    assert after["eval_tau"] > before["eval_tau"]
    trainer.save_model(str(tmp_path / "final"))
    loaded = load_drafter(str(tmp_path / "final"), target=target)
    assert isinstance(loaded, EagleDrafter)
    inputs = {"input_ids": rows[1]["input_ids"][None, :8]}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    tree = replace(loaded.tree_config, nodes=8)
    assert_identical(target, loaded, inputs, do_sample=False, max_new_tokens=12, tree_config=tree)


def test_what_belongs_to_dart_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="selector_rank belongs to DART heads"):
        EagleConfig(selector_rank=4)
    with pytest.raises(ValueError, match="beam is 0"):
        EagleConfig(beam=0)
