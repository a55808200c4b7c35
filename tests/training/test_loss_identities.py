"""What the losses have to do with each other and with verification, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from support.tiny_training import BLOCKS, LENGTH, WORDS, examples
from torch import Tensor

from hf_dart.training.objective import losses
from hf_dart.training.objective.losses import NO_LABEL

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), leaf, retain_graph=True)[0]


def drafted() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `examples`, and the cross-entropies of the draft, which is a leaf."""
    draft, target, labels = examples()
    draft.requires_grad_()
    return draft, target, labels, losses.cross_entropy(draft, labels)


def test_the_chain_is_dpace_without_smoothing() -> None:
    draft, _, labels, ce = drafted()
    chain = losses.chain_loss(losses.hard_chain(ce, labels))
    dpace = losses.dpace_weights(ce, labels, alpha=0.0) * ce
    torch.testing.assert_close(gradient(chain, draft), gradient(dpace, draft), **EXACT)


def test_dpace_smoothed_away_is_linear() -> None:
    _, _, labels, ce = drafted()
    labels = labels.clamp(min=0)
    dpace = losses.dpace_weights(ce, labels, alpha=1.0)
    linear = torch.arange(LENGTH, 0, -1, dtype=ce.dtype)
    torch.testing.assert_close(dpace, linear.expand_as(dpace), **EXACT)


def test_coupled_sampling_is_agreement_for_a_target_without_doubt() -> None:
    """At temperature 0 acceptance is agreement, however it is verified."""
    draft, _, labels = examples()
    labels = labels.clamp(min=0)
    certain = torch.zeros(BLOCKS, LENGTH, WORDS, dtype=torch.float64).scatter(-1, labels[..., None], 1e5)
    hard = losses.hard_chain(losses.cross_entropy(draft, labels), labels)
    torch.testing.assert_close(losses.coupled_chain(draft, certain, labels), hard, **EXACT)
    ce = losses.cross_entropy(draft, labels)
    torch.testing.assert_close(losses.kl_divergence(draft, certain), ce, **EXACT)
    torch.testing.assert_close(-losses.log_acceptance(draft, certain), ce, **EXACT)


def test_acceptance_is_one_minus_total_variation() -> None:
    draft, target, _ = examples()
    draft.requires_grad_()
    log_acceptance, tv = losses.log_acceptance(draft, target), losses.total_variation(draft, target)
    torch.testing.assert_close(log_acceptance.exp(), 1 - tv, **EXACT)
    # LK: the gradient of -log acceptance is that of total variation, larger where little is accepted.
    scaled = gradient(tv, draft) / log_acceptance.exp()[..., None]
    torch.testing.assert_close(gradient(-log_acceptance, draft), scaled.detach(), **EXACT)


def test_lk_goes_from_kl_to_total_variation() -> None:
    draft, target, _ = examples()
    kl, tv = losses.kl_divergence(draft, target), losses.total_variation(draft, target)
    none, always = torch.zeros(LENGTH), torch.ones(LENGTH)
    torch.testing.assert_close(losses.lk_divergence(draft, target, none), kl, **EXACT)
    torch.testing.assert_close(losses.lk_divergence(draft, target, always, eta=100.0), tv, **EXACT)


def score_entropy(log_scores: Tensor, labels: Tensor, masked: Tensor, time: Tensor) -> Tensor:
    """Denoising score entropy of absorbing diffusion with a log-linear schedule, as SEDD writes it down [n].

    `log_scores` [n, d, V] are log p(block with that token) / p(block with the mask). d sigma / d time (sum_v s_v -
    ratio log s_label + ratio (log ratio - 1)), with sigma = -log(1 - time) and ratio = (1 - time) / time.
    """
    ratio = ((1 - time) / time)[:, None]
    of_label = log_scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    tokens = (log_scores.exp().sum(-1) - ratio * of_label + ratio * (ratio.log() - 1)) / (1 - time)[:, None]
    return torch.where(masked & (labels != NO_LABEL), tokens, 0).mean(-1)


def test_masked_cross_entropy_is_score_entropy_of_normalised_scores() -> None:
    draft, _, labels = examples()
    draft.requires_grad_()
    masked = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    time = torch.tensor([0.001, 0.2, 0.5, 0.8, 0.999], dtype=torch.float64)
    scores = ((1 - time) / time).log()[:, None, None] + draft.log_softmax(-1)
    entropy = score_entropy(scores, labels, masked, time)
    ours = losses.masked_cross_entropy(draft, labels, masked, time)
    torch.testing.assert_close(ours, entropy, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient(ours, draft), gradient(entropy, draft), rtol=1e-9, atol=1e-9)


def test_at_the_all_masked_input_a_diffusion_drafter_learns_by_cross_entropy() -> None:
    draft, _, labels = examples()
    everything = torch.ones_like(labels, dtype=torch.bool)
    one = torch.ones(BLOCKS, dtype=torch.float64)
    mean = losses.cross_entropy(draft, labels).mean(-1)
    torch.testing.assert_close(losses.masked_cross_entropy(draft, labels, everything, one), mean, **EXACT)


def test_the_coupled_chain_is_how_often_one_noise_gives_both_the_same_token() -> None:
    random = torch.Generator().manual_seed(5)
    target, draft = torch.randn(2, WORDS, generator=random, dtype=torch.float64).log_softmax(-1)
    count = 200_000
    gumbel = -torch.empty(count, WORDS, dtype=torch.float64).exponential_(generator=random).log()
    drawn, guessed = (target + gumbel).argmax(-1), (draft + gumbel).argmax(-1)
    chances = []
    for word in range(WORDS):
        label = torch.tensor([[word]])
        chances.append(losses.coupled_chain(draft[None, None], target[None, None], label).exp().item())
        mine = drawn == word
        share, error = float((guessed[mine] == word).double().mean()), math.sqrt(0.25 / int(mine.sum()))
        assert abs(share - chances[-1]) < 4 * error
    # The token that the draft overrates most is never missed.
    assert chances[int((draft - target).argmax())] == pytest.approx(1)
    assert min(chances) < 0.5
