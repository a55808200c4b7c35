"""What a draft is trained on: pure functions, reduced to one number per token or per block, never over blocks.

n blocks of d draft tokens over a vocabulary of V. `draft_logits` and `target_logits` [n, d, V] are finite and need
not be normalised; the target's entry t is its distribution for draft token t behind the true tokens before it.
`labels` [n, d] are the true tokens, `NO_LABEL` where there is none; behind a missing label nothing is known.
All is computed in fp32 or better, losses are in nats. Which of them make up the loss of a training run is
said by `objective.Objective`; `chunks.chunked` bounds their memory.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

NO_LABEL = -100
_LEAST_BETA = 1e-3  # below, logsumexp(beta c) / beta loses in fp32 more than the limit is off


def log_probabilities(logits: Tensor) -> Tensor:
    """[..., V] to log-probabilities [..., V], in fp32 or better."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


# ---- how far a draft is from its target: [..., V] and [..., V] to [...] ---------------------------------------


def kl_divergence(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(target || draft)."""
    return _kl(log_probabilities(draft_logits), log_probabilities(target_logits))


def reverse_kl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(draft || target)."""
    return kl_divergence(target_logits, draft_logits)


def js_divergence(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Jensen-Shannon: the mean KL of both to their even mixture; at most log 2."""
    draft, target = log_probabilities(draft_logits), log_probabilities(target_logits)
    mixture = torch.logaddexp(draft, target) - math.log(2)
    return (target.exp() * (target - mixture) + draft.exp() * (draft - mixture)).sum(-1) / 2


def total_variation(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Half the L1 distance: the chance that speculative sampling rejects. Alone it hardly trains from scratch."""
    return _tv(log_probabilities(draft_logits), log_probabilities(target_logits))


def log_acceptance(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Log of the chance that speculative sampling accepts, sum_v min(p, q) (LK losses, arXiv 2602.23881)."""
    return torch.minimum(log_probabilities(draft_logits), log_probabilities(target_logits)).logsumexp(-1)


def lk_divergence(draft_logits: Tensor, target_logits: Tensor, acceptance: Tensor, eta: float = 3.0) -> Tensor:
    """From KL to total variation as the draft gets better (hybrid LK loss, arXiv 2602.23881).

    Args:
        draft_logits, target_logits: [n, d, V].
        acceptance: [d] the mean of exp(`log_acceptance`) per depth over a batch, without gradient.
        eta: the share of KL is exp(-eta acceptance).

    Returns:
        [n, d]
    """
    draft, target = log_probabilities(draft_logits), log_probabilities(target_logits)
    share = (-eta * acceptance).exp()
    return share * _kl(draft, target) + (1 - share) * _tv(draft, target)


def _kl(draft: Tensor, target: Tensor) -> Tensor:
    """[...] of log-probabilities [..., V]."""
    return (target.exp() * (target - draft)).sum(-1)


def _tv(draft: Tensor, target: Tensor) -> Tensor:
    """[...] of log-probabilities [..., V]."""
    return (draft.exp() - target.exp()).abs().sum(-1) / 2


def cross_entropy(draft_logits: Tensor, labels: Tensor) -> Tensor:
    """-log q(label) [n, d]; 0 where there is no label."""
    logits = draft_logits.to(torch.promote_types(draft_logits.dtype, torch.float32))
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="none")
    return losses.view(labels.shape)


# ---- what a draft token is worth by its place ------------------------------------------------------------------


def exponential_weights(losses: Tensor, gamma: float) -> Tensor:
    """[d] weights gamma^(t - 1) for losses [n, d], of sum 1 so that different gamma and d compare; 1 is uniform."""
    weights = gamma ** torch.arange(losses.shape[-1], dtype=losses.dtype, device=losses.device)
    return weights / weights.sum()


def linear_weights(losses: Tensor) -> Tensor:
    """[d] weights d, d - 1, ..., 1 for losses [n, d], scaled to sum 1."""
    weights = torch.arange(losses.shape[-1], 0, -1, dtype=losses.dtype, device=losses.device)
    return weights / weights.sum()


def annealed_kl(draft_logits: Tensor, target_logits: Tensor, gamma: float = 0.6) -> Tensor:
    """DART's loss (arXiv 2601.19278, section 3.2): later draft tokens count less, by gamma per token.

    A draft token is worth nothing once an earlier one was wrong; gamma is about the chance that it was right.

    Args:
        draft_logits, target_logits: [n, d, V].
        gamma: weight of a draft token relative to the one before.

    Returns:
        [n] weighted mean KL(target || draft) of each block.
    """
    losses = kl_divergence(draft_logits, target_logits)
    return (losses * exponential_weights(losses, gamma)).sum(-1)


def dpace_weights(losses: Tensor, labels: Tensor, alpha: float = 0.5) -> Tensor:
    """What a token adds to the expected accepted length: sum over m >= j of prod_{i <= m} ((1 - alpha) q_i + alpha).

    D-PACE (arXiv 2605.18810). With alpha 0 the weighted cross-entropy has the gradient of `-hard_chain`'s expected
    length; with alpha 1 the weights are d, d - 1, ..., 1.

    Args:
        losses: [n, d] as `cross_entropy` gives them; no gradient goes through the weights.
        labels: [n, d].

    Returns:
        [n, d]; 0 where nothing is known.
    """
    known = _known(labels)
    survival = torch.where(known, ((1 - alpha) * (-losses.detach()).exp() + alpha).log(), 0).cumsum(-1).exp()
    return torch.where(known, survival, 0).flip(-1).cumsum(-1).flip(-1)


# ---- what is lost left to right (arXiv 2606.11552) -------------------------------------------------------------


def first_errors(draft_logits: Tensor, labels: Tensor) -> Tensor:
    """[n, d] bool: True at the first token of a block whose argmax is not the label, if there is one."""
    wrong = (draft_logits.argmax(-1) != labels) & _known(labels)
    return wrong & (wrong.cumsum(-1) == 1)


def focal_loss(losses: Tensor, errors: Tensor) -> Tensor:
    """[n] the loss at the first error: of `losses` [n, d] where `errors` [n, d], of `first_errors`, is True."""
    return torch.where(errors, losses, 0).sum(-1)


def hard_chain(losses: Tensor, labels: Tensor) -> Tensor:
    """log P(the first k draft tokens are the labels) [n, d], each drawn from the draft, of `cross_entropy` [n, d].

    This and the other chains are -inf where nothing is known; `chain_loss` makes losses of them, and
    `exp(chain).sum(-1)` is the number of draft tokens expected to be accepted.
    """
    return torch.where(_known(labels), -losses.cumsum(-1), -math.inf)


def token_chain(draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """[n, d] as `hard_chain`, for speculative sampling that verifies token by token.

    prod_{j < k} min(1, q_j / p_j)(y_j) * sum_v min(p_k, q_k); with labels drawn from the target its expectation is
    the chance that token k is accepted.
    """
    draft, target = log_probabilities(draft_logits), log_probabilities(target_logits)
    before = _before(_log_ratios(draft, target, labels).clamp(max=0))
    chain = before + torch.minimum(draft, target).logsumexp(-1)
    return torch.where(_known_before(labels), chain, -math.inf)


def block_chain(draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """[n, d] as `token_chain`, for block verification (arXiv 2403.10444; as a loss, arXiv 2609.34832).

    sum_v min(a_{k-1} p_k(v), r_{k-1} q_k(v)), r the product of q / p along the labels, a its running minimum.
    """
    draft, target = log_probabilities(draft_logits), log_probabilities(target_logits)
    ratio = _before(_log_ratios(draft, target, labels))
    lowest = ratio.cummin(-1).values
    chain = torch.minimum(lowest[..., None] + target, ratio[..., None] + draft).logsumexp(-1)
    return torch.where(_known_before(labels), chain, -math.inf)


def coupled_chain(draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """[n, d] as `hard_chain`, where draft and target choose their tokens with the same noise, as hf_dart samples.

    Both take the argmax of log-probabilities and one Gumbel noise. Given that the target took y, the draft took it
    with chance 1 / sum_v max(p_v, q_v p_y / q_y).
    """
    draft, target = log_probabilities(draft_logits), log_probabilities(target_logits)
    other = draft - _log_ratios(draft, target, labels)[..., None]
    return torch.where(_known(labels), -torch.maximum(target, other).logsumexp(-1).cumsum(-1), -math.inf)


def chain_loss(chain: Tensor, form: str = "linear", beta: float = 1.0) -> Tensor:
    """A chain [n, d] as a loss [n].

    Args:
        chain: of `hard_chain`, `token_chain`, `block_chain` or `coupled_chain`.
        form: "linear" is the expected number of accepted tokens, negated. Its gradient vanishes where a draft is
            hopeless, so it needs another loss beside it. "log" is -(1 / beta) log mean_k exp(beta c_k): free of
            scale, and with a gradient everywhere.
        beta: of the log form: 1 is -log(expected number / d); 0 is the limit, the linearly weighted cross-entropy
            where the chain is hard.
    """
    if form == "linear":
        return -chain.exp().sum(-1)
    known = chain > -math.inf
    count = known.sum(-1)
    # A block of which nothing is known: any finite value, so that no gradient is NaN.
    chain = torch.where((count == 0)[..., None], 0, chain)
    if beta < _LEAST_BETA:
        return -torch.where(known, chain, 0).sum(-1) / count.clamp(min=1)
    mean = (beta * chain).logsumexp(-1) - count.clamp(min=1).to(chain.dtype).log()
    return torch.where(count == 0, 0, -mean / beta)


def _known(labels: Tensor) -> Tensor:
    """[n, d] bool: no label is missing up to here."""
    return (labels != NO_LABEL).cummin(-1).values


def _known_before(labels: Tensor) -> Tensor:
    """[n, d] bool: no label is missing in front of here."""
    return F.pad(_known(labels)[..., :-1], (1, 0), value=True)


def _before(terms: Tensor) -> Tensor:
    """[n, d] sums of the terms [n, d] in front of each."""
    return F.pad(terms.cumsum(-1)[..., :-1], (1, 0))


def _log_ratios(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """[n, d] log q(label) - log p(label), of log-probabilities [n, d, V]; 0 where there is no label."""
    where = labels.clamp(min=0)[..., None]
    return torch.where(labels != NO_LABEL, (draft.gather(-1, where) - target.gather(-1, where))[..., 0], 0)


# ---- partially revealed drafts (absorbing diffusion), and confidence -------------------------------------------


def masked_cross_entropy(draft_logits: Tensor, labels: Tensor, masked: Tensor, time: Tensor) -> Tensor:
    """The bound of a masked diffusion model with a linear schedule (MDLM, arXiv 2406.07524).

    Args:
        draft_logits: [n, d, V] behind a block of which only the tokens that are not `masked` were shown.
        labels: [n, d].
        masked: [n, d] bool.
        time: [n] in (0, 1], the chance with which tokens of the block were masked. At 1, where nothing is
            shown, this is the mean cross-entropy.

    Returns:
        [n] sum of the masked tokens' cross-entropies / (time d).
    """
    return torch.where(masked, cross_entropy(draft_logits, labels), 0).mean(-1) / time


def score_entropy(log_scores: Tensor, labels: Tensor, masked: Tensor, time: Tensor) -> Tensor:
    """Denoising score entropy of absorbing diffusion with a log-linear schedule (SEDD, arXiv 2310.16834).

    With log_scores = log((1 - time) / time) + log q, q normalised, it is `masked_cross_entropy` of q; free scores
    also have to learn their scale.

    Args:
        log_scores: [n, d, V] log p(block with that token) / p(block with the mask).
        labels, masked: as for `masked_cross_entropy`.
        time: [n] in (0, 1).

    Returns:
        [n]
    """
    log_scores = log_scores.to(torch.promote_types(log_scores.dtype, torch.float32))
    time = time[:, None]
    known = labels != NO_LABEL
    score = log_scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    # d sigma / d time (sum_v s_v - ratio log s_label + ratio (log ratio - 1)), sigma = -log(1 - time)
    constant = ((1 - time) / time).log() - 1
    losses = log_scores.logsumexp(-1).exp() / (1 - time) + (constant - score) / time
    return torch.where(masked & known, losses, 0).mean(-1)


def confidence_loss(confidence_logits: Tensor, accepted: Tensor) -> Tensor:
    """Binary cross-entropy of a head that foretells acceptance (DSpark, arXiv 2607.05147).

    Args:
        confidence_logits: [n, d].
        accepted: [n, d] in [0, 1]: exp(`log_acceptance`), or 1 up to the first error; no gradient goes through it.

    Returns:
        [n] mean over the d tokens.
    """
    accepted = accepted.detach().to(confidence_logits.dtype)
    return F.binary_cross_entropy_with_logits(confidence_logits, accepted, reduction="none").mean(-1)
