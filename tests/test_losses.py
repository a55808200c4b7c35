"""Losses against what their papers write down, and chunked against whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_dart.training.losses import annealed_kl, annealing_weights, chunked


def test_annealed_kl_against_the_sum_written_out() -> None:
    random = torch.Generator().manual_seed(0)
    draft = torch.randn(3, 4, 7, generator=random)
    goal = torch.randn(3, 4, 7, generator=random)
    losses = annealed_kl(draft, goal, gamma=0.6)
    weights = [0.6**t for t in range(4)]
    for n in range(3):
        expected = 0.0
        for t in range(4):
            p = [math.exp(x) for x in goal[n, t].tolist()]
            q = [math.exp(x) for x in draft[n, t].tolist()]
            p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
            kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            expected += weights[t] / sum(weights) * kl
        assert losses[n].item() == pytest.approx(expected, rel=1e-5)
    assert annealed_kl(goal, goal).abs().max() < 1e-6
    assert annealing_weights(8, 1.0).tolist() == pytest.approx([1 / 8] * 8)


def test_chunks_give_the_loss_and_gradient_of_the_whole() -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(11, 6, generator=random, dtype=torch.float64)
    goals = torch.randn(5, 4, 11, generator=random, dtype=torch.float64)

    def losses(hidden: Tensor, goals: Tensor) -> Tensor:
        return ((hidden @ weight.T).log_softmax(-1) * goals).sum((1, 2))

    results = []
    for size in (0, 1, 2, 5, 9):
        hidden = torch.linspace(-1, 1, 5 * 4 * 6, dtype=torch.float64).view(5, 4, 6).requires_grad_()
        total = chunked(losses, hidden, goals, size)
        (3 * total).backward()
        results.append((total.item(), hidden.grad))
    for total, gradient in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-6)
        torch.testing.assert_close(gradient, results[0][1])
