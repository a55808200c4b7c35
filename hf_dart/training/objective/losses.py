"""Losses of drafts: pure functions, reduced to one number per token or per block, never over blocks.

n blocks of d draft tokens over a vocabulary of V. `draft_logits` and `target_logits` [n, d, V] are finite and need
not be normalised; the target's entry t is its distribution of draft token t after the true tokens before it. `labels`
[n, d] are the true tokens, `NO_LABEL` where there is none; from the first missing label on nothing is known. All is
computed in fp32 or better, losses are in nats. `Objective` says which of them make up the loss of a training run;
`chunked` bounds their memory.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

NO_LABEL = -100


def log_probabilities(logits: Tensor) -> Tensor:
    """[..., V] to log-probabilities [..., V], in fp32 or better."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


# ---- how far a draft is from its target: [..., V] and [..., V] to [...] ---------------------------------------


def kl_divergence(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(target || draft) in nats: [..., V] and [..., V] to [...]."""
    return _kl(log_probabilities(draft_logits), log_probabilities(target_logits))


def total_variation(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Half the L1 distance: the chance that speculative sampling rejects. Alone it hardly trains from scratch."""
    return _tv(log_probabilities(draft_logits), log_probabilities(target_logits))


def log_acceptance(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Log of the chance that speculative sampling accepts, sum_v min(p, q) (LK losses, arXiv 2602.23881)."""
    return torch.minimum(log_probabilities(draft_logits), log_probabilities(target_logits)).logsumexp(-1)


def lk_divergence(draft_logits: Tensor, target_logits: Tensor, acceptance: Tensor, eta: float = 3.0) -> Tensor:
    """Mixture that goes from KL to total variation as the draft gets better (hybrid LK loss, arXiv 2602.23881).

    Args:
        draft_logits, target_logits: [n, d, V]; losses are [n, d].
        acceptance: [d] the mean of exp(`log_acceptance`) per depth over a batch, without gradient.
        eta: the share of KL is exp(-eta acceptance).
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


# ---- what a draft token is worth by its position ---------------------------------------------------------------


def exponential_weights(losses: Tensor, gamma: float) -> Tensor:
    """[d] weights gamma^(t - 1) for losses [n, d], of sum 1 so that different gamma and d compare; 1 is uniform."""
    weights = gamma ** torch.arange(losses.shape[-1], dtype=losses.dtype, device=losses.device)
    return weights / weights.sum()


def annealed_kl(draft_logits: Tensor, target_logits: Tensor, gamma: float = 0.6) -> Tensor:
    """DART's loss (arXiv 2601.19278, section 3.2): later draft tokens count less, by gamma per token.

    A draft token is worth nothing once an earlier one was wrong; gamma is about the chance that it was right.

    Returns:
        [n] weighted mean KL(target || draft) of each block.
    """
    losses = kl_divergence(draft_logits, target_logits)
    return (losses * exponential_weights(losses, gamma)).sum(-1)


def dpace_weights(losses: Tensor, labels: Tensor, alpha: float = 0.5) -> Tensor:
    """Gain in expected accepted length of each token: sum over m >= j of prod_{i <= m} ((1 - alpha) q_i + alpha).

    D-PACE (arXiv 2605.18810). With alpha 0 the weighted cross-entropy has the gradient of the linear `chain_loss`;
    with alpha 1 the weights are d, d - 1, ..., 1.

    Args:
        losses, labels: [n, d] as for `cross_entropy`; no gradient goes through the weights [n, d].
    """
    known = _known(labels)
    survival = torch.where(known, ((1 - alpha) * (-losses.detach()).exp() + alpha).log(), 0).cumsum(-1).exp()
    return torch.where(known, survival, 0).flip(-1).cumsum(-1).flip(-1)


# ---- left to right ("Teaching Diffusion to Speculate Left-to-Right", arXiv 2606.11552) -------------------------


def first_errors(draft_logits: Tensor, labels: Tensor) -> Tensor:
    """[n, d] bool: True at the first token of a block whose argmax is not the label, if there is one."""
    wrong = (draft_logits.argmax(-1) != labels) & _known(labels)
    return wrong & (wrong.cumsum(-1) == 1)


def focal_loss(losses: Tensor, errors: Tensor) -> Tensor:
    """[n] the loss at the first error: of `losses` [n, d] where `errors` [n, d], of `first_errors`, is True."""
    return torch.where(errors, losses, 0).sum(-1)


def hard_chain(losses: Tensor, labels: Tensor) -> Tensor:
    """Log P(the first k draft tokens are the labels) [n, d], each drawn from the draft, of `cross_entropy` [n, d].

    -inf where nothing is known. `exp(chain).sum(-1)` is the number of draft tokens expected to be accepted.
    """
    return torch.where(_known(labels), -losses.cumsum(-1), -math.inf)


def coupled_chain(draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """[n, d] as `hard_chain`, where draft and target choose their tokens with the same noise, as hf_dart samples.

    Both take the argmax of log-probabilities and one Gumbel noise. Given that the target took y, the draft took it
    with chance 1 / sum_v max(p_v, q_v p_y / q_y).
    """
    draft, target = log_probabilities(draft_logits), log_probabilities(target_logits)
    where = labels.clamp(min=0)[..., None]
    other = draft - (draft.gather(-1, where) - target.gather(-1, where))
    return torch.where(_known(labels), -torch.maximum(target, other).logsumexp(-1).cumsum(-1), -math.inf)


def chain_loss(chain: Tensor, form: str = "linear") -> Tensor:
    """Return a chain [n, d] of log-probabilities, such as `hard_chain` gives, as a loss [n].

    Args:
        chain: [n, d], -inf where nothing is known.
        form: "linear" is the expected number of accepted tokens, negated. Its gradient vanishes where a draft is
            hopeless, so it needs another loss in addition. "log" is -log(expected number / d): free of scale, and with
            a gradient everywhere (arXiv 2609.34832).
    """
    if form == "linear":
        return -chain.exp().sum(-1)
    count = (chain > -math.inf).sum(-1)
    # A block of which nothing is known: any finite value, so that no gradient is NaN.
    chain = torch.where((count == 0)[..., None], 0, chain)
    mean = chain.logsumexp(-1) - count.clamp(min=1).to(chain.dtype).log()
    return torch.where(count == 0, 0, -mean)


def _known(labels: Tensor) -> Tensor:
    """[n, d] bool: no label is missing up to here."""
    return (labels != NO_LABEL).cummin(-1).values
