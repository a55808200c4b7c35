"""What the losses have to do with each other and with verification, in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from test_losses import BLOCKS, CHAINS, LENGTH, WORDS, examples
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
    linear = losses.linear_weights(ce) * LENGTH * (LENGTH + 1) / 2
    torch.testing.assert_close(dpace, linear.expand_as(dpace), **EXACT)


def test_the_power_mean_of_a_chain_lies_between_linear_and_log() -> None:
    draft, target, labels = examples()
    draft.requires_grad_()
    labels = labels.clamp(min=0)
    ce = losses.cross_entropy(draft, labels)
    chain = losses.hard_chain(ce, labels)
    towards_zero = gradient(losses.chain_loss(chain, "log", beta=1e-7), draft)
    linear = gradient(losses.linear_weights(ce) * ce * (LENGTH + 1) / 2, draft)
    torch.testing.assert_close(towards_zero, linear, rtol=1e-5, atol=1e-6)
    for other in (chain, losses.token_chain(draft, target, labels)):
        one = losses.chain_loss(other, "log", beta=1.0)
        torch.testing.assert_close(one, -(-losses.chain_loss(other) / LENGTH).log(), **EXACT)


def test_every_rule_is_the_hard_one_for_a_target_without_doubt() -> None:
    """At temperature 0 acceptance is agreement, however it is verified."""
    draft, _, labels = examples()
    labels = labels.clamp(min=0)
    certain = torch.zeros(BLOCKS, LENGTH, WORDS, dtype=torch.float64).scatter(-1, labels[..., None], 1e5)
    hard = CHAINS["hard"](draft, certain, labels)
    for rule in ("token", "block", "coupled"):
        torch.testing.assert_close(CHAINS[rule](draft, certain, labels), hard, **EXACT)
    ce = losses.cross_entropy(draft, labels)
    torch.testing.assert_close(losses.kl_divergence(draft, certain), ce, **EXACT)
    torch.testing.assert_close(-losses.log_acceptance(draft, certain), ce, **EXACT)


def test_block_verification_accepts_no_less() -> None:
    draft, target, labels = examples()
    token, block = (CHAINS[rule](draft, target, labels).exp().sum(-1) for rule in ("token", "block"))
    assert (block >= token - 1e-12).all()


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


def test_score_entropy_of_normalised_scores_is_masked_cross_entropy() -> None:
    draft, _, labels = examples()
    draft.requires_grad_()
    masked = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    time = torch.tensor([0.001, 0.2, 0.5, 0.8, 0.999], dtype=torch.float64)
    scores = ((1 - time) / time).log()[:, None, None] + draft.log_softmax(-1)
    entropy = losses.score_entropy(scores, labels, masked, time)
    expected = losses.masked_cross_entropy(draft, labels, masked, time)
    torch.testing.assert_close(entropy, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient(entropy, draft), gradient(expected, draft), rtol=1e-9, atol=1e-9)
    # Scores of another scale cost more.
    assert (losses.score_entropy(scores + 0.1, labels, masked, time) > entropy)[masked.any(-1)].all()


def test_at_the_all_masked_input_a_diffusion_drafter_learns_by_cross_entropy() -> None:
    draft, _, labels = examples()
    everything = torch.ones_like(labels, dtype=torch.bool)
    one = torch.ones(BLOCKS, dtype=torch.float64)
    mean = losses.cross_entropy(draft, labels).mean(-1)
    torch.testing.assert_close(losses.masked_cross_entropy(draft, labels, everything, one), mean, **EXACT)


def accepted_by_tokens(p: list[float], q: list[float]) -> float:
    """Expected accepted tokens of one drafted path, given its probabilities under target and draft."""
    survival, total = 1.0, 0.0
    for a, b in zip(p, q, strict=True):
        survival *= min(1.0, a / b)
        total += survival
    return total


def accepted_by_blocks(path: tuple[int, ...], target: dict[tuple[int, ...], list[float]], draft: list) -> float:
    """As `accepted_by_tokens`, for block verification (arXiv 2403.10444, algorithm 2)."""
    depth = len(path)
    ratios = [1.0]
    for t, word in enumerate(path):
        ratios.append(min(1.0, ratios[-1] * target[path[:t]][word] / draft[t][word]))
    total, none_longer = 0.0, 1.0
    for length in range(depth, 0, -1):
        chance = ratios[depth]
        if length < depth:
            after = zip(target[path[:length]], draft[length], strict=True)
            left = sum(max(ratios[length] * a - b, 0.0) for a, b in after)
            chance = left / (left + 1 - ratios[length]) if left + 1 - ratios[length] > 0 else 1.0
        total += length * none_longer * chance
        none_longer *= 1 - chance
    return total


@pytest.mark.parametrize("rule", ["token", "block"])
def test_chains_are_the_length_that_verification_accepts(rule: str) -> None:
    """All paths of 3 words in 3 positions: drafted and verified, against the chain of paths that the target draws."""
    words, depth = 3, 3
    random = torch.Generator().manual_seed(4)
    draft_logits = 1.3 * torch.randn(depth, words, generator=random, dtype=torch.float64)
    draft = draft_logits.softmax(-1).tolist()
    target_logits = {
        prefix: 1.3 * torch.randn(words, generator=random, dtype=torch.float64)
        for length in range(depth)
        for prefix in itertools.product(range(words), repeat=length)
    }
    target = {prefix: logits.softmax(-1).tolist() for prefix, logits in target_logits.items()}

    paths = list(itertools.product(range(words), repeat=depth))
    direct, weights = 0.0, []
    for path in paths:
        p = [target[path[:t]][word] for t, word in enumerate(path)]
        q = [draft[t][word] for t, word in enumerate(path)]
        verified = accepted_by_tokens(p, q) if rule == "token" else accepted_by_blocks(path, target, draft)
        direct += math.prod(q) * verified
        weights.append(math.prod(p))
    labels = torch.tensor(paths)
    drafts = draft_logits.expand(len(paths), -1, -1)
    targets = torch.stack([torch.stack([target_logits[path[:t]] for t in range(depth)]) for path in paths])
    chain = CHAINS[rule](drafts, targets, labels)
    expected = (torch.tensor(weights, dtype=torch.float64) * -losses.chain_loss(chain)).sum()
    assert expected.item() == pytest.approx(direct, abs=1e-12)
    # The last label is not looked at: what is accepted there is a sum over all words.
    labels[:, -1] = NO_LABEL
    assert torch.equal(CHAINS[rule](drafts, targets, labels), chain)


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
