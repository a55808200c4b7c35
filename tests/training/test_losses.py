"""Losses against what their papers write down, and against each other, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.tiny_training import LENGTH, WORDS, examples
from torch import Tensor

from hf_dart.training.objective import losses
from hf_dart.training.objective.losses import NO_LABEL

assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def probabilities(logits: Tensor) -> Tensor:
    """The textbook softmax."""
    return logits.exp() / logits.exp().sum(-1, keepdim=True)


def of_labels(values: Tensor, labels: Tensor) -> Tensor:
    return values.gather(-1, labels.clamp(min=0)[..., None])[..., 0]


def known_in(labels: Tensor) -> Tensor:
    """True up to the first missing label."""
    return torch.tensor([[NO_LABEL not in row[: t + 1] for t in range(LENGTH)] for row in labels.tolist()])


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(-1)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    return torch.minimum(p, q).sum(-1)


DIVERGENCES: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "kl": (losses.kl_divergence, kl),
    "tv": (losses.total_variation, lambda p, q: 1 - overlap(p, q)),
    "log acceptance": (losses.log_acceptance, lambda p, q: overlap(p, q).log()),
    "lk": (
        partial(losses.lk_divergence, acceptance=torch.tensor(0.4, dtype=torch.float64), eta=2.0),
        lambda p, q: math.exp(-0.8) * kl(p, q) + (1 - math.exp(-0.8)) * (1 - overlap(p, q)),
    ),
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences(name: str) -> None:
    """Also fp16 in, fp32 out: a hopeless draft, and tokens that are all but ruled out."""
    ours, formula = DIVERGENCES[name]
    draft, target, _ = examples()
    assert_close(ours(draft, target), formula(probabilities(target), probabilities(draft)))
    assert torch.autograd.gradcheck(lambda draft: ours(draft, target), draft.requires_grad_())
    target = torch.tensor([[[3e4, 0.0, -3e4, -6e4]], [[0.0, 0.0, 0.0, -6e4]]], dtype=torch.float16)
    draft = torch.tensor([[[-3e4, 0.0, 3e4, -6e4]], [[0.0, 0.0, 0.0, 0.0]]], dtype=torch.float16).requires_grad_()
    result = ours(draft, target)
    result.sum().backward()
    assert result.dtype == torch.float32
    assert result.isfinite().all()
    assert draft.grad.isfinite().all()
    assert ours(target, target).abs().max() < 1e-6


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_cross_entropy_and_dpace_weights(alpha: float) -> None:
    draft, _, labels = examples()
    q, known = of_labels(probabilities(draft), labels), known_in(labels)
    ce = losses.cross_entropy(draft.requires_grad_(), labels)
    assert_close(ce, torch.where(labels == NO_LABEL, 0, -q.log()))
    weights = losses.dpace_weights(ce, labels, alpha)
    assert not weights.requires_grad
    survival = torch.where(known, ((1 - alpha) * q + alpha).cumprod(-1), 0)
    assert_close(weights, torch.stack([survival[:, j:].sum(-1) for j in range(LENGTH)], dim=-1) * known)


def test_first_errors_and_the_focal_loss() -> None:
    draft, _, labels = examples()
    labels[0] = draft[0].argmax(-1)  # no error
    labels[4, 0] = draft[4, 0].argmax()
    labels[4, 1] = (draft[4, 1].argmax() + 1) % WORDS
    ce = losses.cross_entropy(draft, labels)
    errors = losses.first_errors(draft, labels)
    assert errors.sum(-1).tolist()[0] == errors.sum(-1).tolist()[3] == 0
    assert errors[4].tolist() == [False, True, False, False]
    wrong = [row.nonzero().flatten().tolist()[:1] for row in (draft.argmax(-1) != labels) & known_in(labels)]
    assert [row.nonzero().flatten().tolist() for row in errors] == wrong
    expected = [float(ce[n, first[0]]) if first else 0.0 for n, first in enumerate(wrong)]
    assert_close(losses.focal_loss(ce, errors), torch.tensor(expected, dtype=torch.float64))


CHAINS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "hard": lambda draft, target, labels: losses.hard_chain(losses.cross_entropy(draft, labels), labels),
    "coupled": losses.coupled_chain,
}


@pytest.mark.parametrize("rule", CHAINS)
def test_chains(rule: str) -> None:
    """And their gradients, also of blocks whose labels are missing, in part or altogether."""
    draft, target, labels = examples()
    p, q, known = probabilities(target), probabilities(draft), known_in(labels)
    ratio = of_labels(p, labels) / of_labels(q, labels)
    chances = of_labels(q, labels) if rule == "hard" else 1 / torch.maximum(p, q * ratio[..., None]).sum(-1)
    written = torch.where(known, chances.cumprod(-1), 0)
    chain = CHAINS[rule](draft, target, labels)
    assert_close(chain.exp(), written)
    assert_close(losses.chain_loss(chain), -written.sum(-1))
    assert_close(losses.chain_loss(chain, "log"), -(written.sum(-1) / known.sum(-1)).log().nan_to_num(0.0))
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


def test_cross_entropy_of_masked_tokens_is_score_entropy_of_normalised_scores() -> None:
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
    ours = torch.where(masked, losses.cross_entropy(draft, labels), 0).mean(-1) / time
    torch.testing.assert_close(ours, entropy, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(loss.sum(), draft, retain_graph=True)[0] for loss in (ours, entropy)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
