"""Losses against what their papers write down, and against each other, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

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


def test_annealed_kl() -> None:
    draft, target, _ = examples()
    p, q = probabilities(target), probabilities(draft)
    weights = [0.6**t for t in range(LENGTH)]
    expected = [
        sum(weight / sum(weights) * kl(p[n][t], q[n][t]) for t, weight in enumerate(weights)) for n in range(BLOCKS)
    ]
    assert_close(losses.annealed_kl(draft, target, gamma=0.6), expected)


def test_cross_entropy() -> None:
    draft, _, labels = examples()
    q = probabilities(draft)
    expected = [
        [0.0 if y == NO_LABEL else -math.log(q[n][t][y]) for t, y in enumerate(row)]
        for n, row in enumerate(labels.tolist())
    ]
    assert_close(losses.cross_entropy(draft, labels), expected)
    assert torch.autograd.gradcheck(lambda draft: losses.cross_entropy(draft, labels), draft.requires_grad_())


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


def chain_written_out(rule: str, p: list[list[float]], q: list[list[float]], y: list[int]) -> list[float]:
    """exp of the chain of one block, as far as its labels are known."""
    terms: list[float] = []
    survival = 1.0
    for t in range(LENGTH):
        if y[t] == NO_LABEL:
            break
        p_y, q_y = p[t][y[t]], q[t][y[t]]
        either = sum(max(a, b * p_y / q_y) for a, b in zip(p[t], q[t], strict=True))
        survival *= q_y if rule == "hard" else 1 / either
        terms.append(survival)
    return terms


@pytest.mark.parametrize("rule", CHAINS)
def test_chains(rule: str) -> None:
    draft, target, labels = examples()
    p, q = probabilities(target), probabilities(draft)
    written = [chain_written_out(rule, p[n], q[n], labels[n].tolist()) for n in range(BLOCKS)]
    chain = CHAINS[rule](draft, target, labels)
    assert_close(chain.exp(), [terms + [0.0] * (LENGTH - len(terms)) for terms in written])
    assert_close(losses.chain_loss(chain), [-sum(terms) for terms in written])
    expected = [-math.log(sum(terms) / len(terms)) if terms else 0.0 for terms in written]
    assert_close(losses.chain_loss(chain, "log"), expected)


@pytest.mark.parametrize("form", ["linear", "log"])
@pytest.mark.parametrize("rule", CHAINS)
def test_gradients_of_chains(rule: str, form: str) -> None:
    """Also of blocks whose labels are missing, in part or altogether."""
    draft, target, labels = examples()

    def loss(draft: Tensor) -> Tensor:
        return losses.chain_loss(CHAINS[rule](draft, target, labels), form)

    assert torch.autograd.gradcheck(loss, draft.requires_grad_())


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


def test_masked_cross_entropy() -> None:
    draft, _, labels = examples()
    masked = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    time = torch.tensor([0.1, 0.3, 0.5, 0.7, 1.0], dtype=torch.float64)
    q = probabilities(draft)
    expected = []
    for n in range(BLOCKS):
        hidden = [t for t in range(LENGTH) if masked[n, t] and labels[n, t] != NO_LABEL]
        total = sum(-math.log(q[n][t][int(labels[n, t])]) for t in hidden)
        expected.append(total / (float(time[n]) * LENGTH))
    assert_close(losses.masked_cross_entropy(draft, labels, masked, time), expected)


# ---- what losses have to do with each other, and with verification ---------------------------------------------


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), leaf, retain_graph=True)[0]


def test_the_chain_is_dpace_without_smoothing() -> None:
    draft, _, labels = examples()
    ce = losses.cross_entropy(draft.requires_grad_(), labels)
    chain = losses.chain_loss(losses.hard_chain(ce, labels))
    dpace = losses.dpace_weights(ce, labels, alpha=0.0) * ce
    torch.testing.assert_close(gradient(chain, draft), gradient(dpace, draft), rtol=1e-10, atol=1e-12)


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
