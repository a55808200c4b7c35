"""Losses against what their papers write down, and against each other, in float64."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import pytest
import torch
from support.tiny_training import BLOCKS, LENGTH, WORDS, examples
from torch import Tensor

from hf_dart.training.objective import losses
from hf_dart.training.objective.losses import NO_LABEL

Losses = Callable[[Tensor, Tensor, Tensor], Tensor]


def probabilities(logits: Tensor) -> list[list[list[float]]]:
    """The textbook softmax."""
    return (logits.exp() / logits.exp().sum(-1, keepdim=True)).tolist()


def assert_close(ours: Tensor, expected: list) -> None:
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=ours.dtype), rtol=1e-10, atol=1e-12)


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def overlap(p: list[float], q: list[float]) -> float:
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


DIVERGENCES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[list[float], list[float]], float]]] = {
    "kl": (losses.kl_divergence, kl),
    "tv": (losses.total_variation, lambda p, q: 1 - overlap(p, q)),
    "log acceptance": (losses.log_acceptance, lambda p, q: math.log(overlap(p, q))),
    "lk": (
        partial(losses.lk_divergence, acceptance=torch.tensor(0.4, dtype=torch.float64), eta=2.0),
        lambda p, q: math.exp(-0.8) * kl(p, q) + (1 - math.exp(-0.8)) * (1 - overlap(p, q)),
    ),
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences(name: str) -> None:
    ours, formula = DIVERGENCES[name]
    draft, target, _ = examples()
    p, q = probabilities(target), probabilities(draft)
    assert_close(ours(draft, target), [[formula(p[n][t], q[n][t]) for t in range(LENGTH)] for n in range(BLOCKS)])
    assert torch.autograd.gradcheck(lambda draft: ours(draft, target), draft.requires_grad_())


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_of_extreme_logits_are_finite(name: str) -> None:
    """fp16 in, fp32 out: a hopeless draft, and tokens that are all but ruled out."""
    ours, _ = DIVERGENCES[name]
    target = torch.tensor([[[3e4, 0.0, -3e4, -6e4]], [[0.0, 0.0, 0.0, -6e4]]], dtype=torch.float16)
    draft = torch.tensor([[[-3e4, 0.0, 3e4, -6e4]], [[0.0, 0.0, 0.0, 0.0]]], dtype=torch.float16)
    draft.requires_grad_()
    result = ours(draft, target)
    assert result.dtype == torch.float32
    assert result.isfinite().all()
    result.sum().backward()
    assert draft.grad.isfinite().all()
    assert ours(target, target).abs().max() < 1e-6


def test_cross_entropy() -> None:
    draft, _, labels = examples()
    q = probabilities(draft)
    expected = [
        [0.0 if y == NO_LABEL else -math.log(q[n][t][y]) for t, y in enumerate(row)]
        for n, row in enumerate(labels.tolist())
    ]
    assert_close(losses.cross_entropy(draft, labels), expected)


def known_lengths(labels: Tensor) -> list[int]:
    return [[*row.tolist(), NO_LABEL].index(NO_LABEL) for row in labels]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights(alpha: float) -> None:
    draft, _, labels = examples()
    q = probabilities(draft)
    expected = []
    for n, known in enumerate(known_lengths(labels)):
        row = [0.0] * LENGTH
        for j in range(known):
            for m in range(j, known):
                row[j] += math.prod((1 - alpha) * q[n][i][int(labels[n, i])] + alpha for i in range(m + 1))
        expected.append(row)
    ce = losses.cross_entropy(draft.requires_grad_(), labels)
    weights = losses.dpace_weights(ce, labels, alpha)
    assert not weights.requires_grad
    assert_close(weights, expected)


def test_first_errors_and_the_focal_loss() -> None:
    draft, _, labels = examples()
    labels[0] = draft[0].argmax(-1)  # no error
    labels[4, 0] = draft[4, 0].argmax()
    labels[4, 1] = (draft[4, 1].argmax() + 1) % WORDS
    ce = losses.cross_entropy(draft, labels)
    errors = losses.first_errors(draft, labels)
    assert errors.sum(-1).tolist()[0] == errors.sum(-1).tolist()[3] == 0
    assert errors[4].tolist() == [False, True, False, False]
    expected = []
    for n, known in enumerate(known_lengths(labels)):
        wrong = [t for t in range(known) if int(draft[n, t].argmax()) != int(labels[n, t])]
        assert errors[n].nonzero().flatten().tolist() == wrong[:1]
        expected.append(float(ce[n, wrong[0]]) if wrong else 0.0)
    assert_close(losses.focal_loss(ce, errors), expected)


def hard(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    return losses.hard_chain(losses.cross_entropy(draft, labels), labels)


CHAINS: dict[str, Losses] = {"hard": hard, "coupled": losses.coupled_chain}


@pytest.mark.parametrize("rule", CHAINS)
def test_chains(rule: str) -> None:
    """And their gradients, also of blocks whose labels are missing, in part or altogether."""
    draft, target, labels = examples()
    p, q = probabilities(target), probabilities(draft)
    written: list[list[float]] = []  # exp of the chain of each block, as far as its labels are known
    for n, known in enumerate(known_lengths(labels)):
        factors = []
        for t, y in enumerate(labels[n, :known].tolist()):
            either = sum(max(a, b * p[n][t][y] / q[n][t][y]) for a, b in zip(p[n][t], q[n][t], strict=True))
            factors.append(q[n][t][y] if rule == "hard" else 1 / either)
        written.append([*accumulate(factors, operator.mul)])
    chain = CHAINS[rule](draft, target, labels)
    assert_close(chain.exp(), [terms + [0.0] * (LENGTH - len(terms)) for terms in written])
    assert_close(losses.chain_loss(chain), [-sum(terms) for terms in written])
    expected = [-math.log(sum(terms) / len(terms)) if terms else 0.0 for terms in written]
    assert_close(losses.chain_loss(chain, "log"), expected)
    draft.requires_grad_()
    for form in ("linear", "log"):

        def loss(draft: Tensor, form: str = form) -> Tensor:
            return losses.chain_loss(CHAINS[rule](draft, target, labels), form)

        assert torch.autograd.gradcheck(loss, draft)


@pytest.mark.parametrize("rule", CHAINS)
def test_hopeless_chains_are_finite(rule: str) -> None:
    """A draft that holds every label for all but impossible: the linear form gives up, the log form does not."""
    draft = torch.zeros(1, 31, 3)
    draft[..., 0] = -200
    labels = torch.zeros(1, 31, dtype=torch.long)
    for form in ("linear", "log"):
        leaf = draft.clone().requires_grad_()
        loss = losses.chain_loss(CHAINS[rule](leaf, -draft, labels), form)
        loss.sum().backward()
        assert loss.isfinite().all()
        assert leaf.grad.isfinite().all()
        assert bool(leaf.grad.abs().max() > 1e-3) == (form == "log")


# ---- what losses have to do with each other, and with verification ---------------------------------------------


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), leaf, retain_graph=True)[0]


def test_the_chain_is_dpace_without_smoothing() -> None:
    draft, _, labels = examples()
    ce = losses.cross_entropy(draft.requires_grad_(), labels)
    chain = losses.chain_loss(losses.hard_chain(ce, labels))
    dpace = losses.dpace_weights(ce, labels, alpha=0.0) * ce
    torch.testing.assert_close(gradient(chain, draft), gradient(dpace, draft), rtol=1e-10, atol=1e-12)


def test_masked_cross_entropy_is_score_entropy_of_normalised_scores() -> None:
    """That of absorbing diffusion with a log-linear schedule, as SEDD writes it down.

    d sigma / d time (sum_v s_v - ratio log s_label + ratio (log ratio - 1)), with sigma = -log(1 - time), ratio =
    (1 - time) / time, and scores s of p(block with that token) / p(block with the mask).
    """
    draft, _, labels = examples()
    draft.requires_grad_()
    masked = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    time = torch.tensor([0.001, 0.2, 0.5, 0.8, 0.999], dtype=torch.float64)
    ratio = ((1 - time) / time)[:, None]
    scores = ratio[..., None].log() + draft.log_softmax(-1)
    of_label = scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    tokens = (scores.exp().sum(-1) - ratio * of_label + ratio * (ratio.log() - 1)) / (1 - time)[:, None]
    entropy = torch.where(masked & (labels != NO_LABEL), tokens, 0).mean(-1)
    ours = losses.masked_cross_entropy(draft, labels, masked, time)
    torch.testing.assert_close(ours, entropy, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient(ours, draft), gradient(entropy, draft), rtol=1e-9, atol=1e-9)


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
