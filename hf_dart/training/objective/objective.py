"""The loss of a training run, put together from `losses`, and its presets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hf_dart.training.objective import losses

_DIVERGENCES = {
    "kl": losses.kl_divergence,
    "reverse_kl": losses.reverse_kl,
    "js": losses.js_divergence,
    "tv": losses.total_variation,
    "log_acceptance": lambda draft, target: -losses.log_acceptance(draft, target),
}
_CHAINS = {"token": losses.token_chain, "block": losses.block_chain, "coupled": losses.coupled_chain}
_CHOICES = {
    "divergence": ("ce", "lk", *_DIVERGENCES),
    "position_weights": ("uniform", "exponential", "linear", "dpace"),
    "chain_rule": ("hard", *_CHAINS),
    "chain_form": ("linear", "log"),
}


@dataclass(frozen=True)
class Objective:
    """token_weight * weighted divergence + focal_weight * focal loss + chain_weight * chain loss, per block.

    Args:
        divergence: of a draft token from its target: "ce" (cross-entropy with the true token), "kl",
            "reverse_kl", "js", "tv", "log_acceptance" (negated), "lk".
        position_weights: "uniform", "exponential" or "linear", which sum to 1, or "dpace", whose weighted
            divergences are averaged.
        gamma: of exponential weights, in (0, 1].
        dpace_alpha: smoothing of the D-PACE weights, in [0, 1].
        lk_eta: how fast "lk" leaves KL behind.
        token_weight, focal_weight, chain_weight: of the three parts, 0 or more; that of the chain's linear form is
            per expected token.
        chain_rule: "hard", "token" or "block" verification, or "coupled" noise.
        chain_form, chain_beta: as for `losses.chain_loss`.
        chain_warmup: share of the training during which the exponent of the log form grows from 0 to chain_beta, in
            [0, 1]: from every token for itself to whole chains (0.5 in arXiv 2609.34832).

    Raises:
        ValueError: a field is out of range.
    """

    divergence: str = "kl"
    position_weights: str = "exponential"
    gamma: float = 0.6
    dpace_alpha: float = 0.5
    lk_eta: float = 3.0
    token_weight: float = 1.0
    focal_weight: float = 0.0
    chain_weight: float = 0.0
    chain_rule: str = "hard"
    chain_form: str = "linear"
    chain_beta: float = 1.0
    chain_warmup: float = 0.0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; give one of {', '.join(choices)}.")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma}; give a number in (0, 1].")
        if not 0 <= self.dpace_alpha <= 1:
            raise ValueError(f"dpace_alpha is {self.dpace_alpha}; give a number in [0, 1].")
        if not self.chain_beta > 0:
            raise ValueError(f"chain_beta is {self.chain_beta}; give a number above 0.")
        if not 0 <= self.chain_warmup <= 1:
            raise ValueError(f"chain_warmup is {self.chain_warmup}; give a number in [0, 1].")
        for name in ("lk_eta", "token_weight", "focal_weight", "chain_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number of 0 or more.")
        if not self.token_weight and not self.focal_weight and not self.chain_weight:
            raise ValueError("token_weight, focal_weight and chain_weight are all 0; nothing would be trained.")

    @property
    def needs_acceptance(self) -> bool:
        """Whether the mean acceptance of the batch has to be known before its losses."""
        return self.divergence == "lk" and self.token_weight > 0

    @property
    def needs_target(self) -> bool:
        """Whether the target's distributions matter, and not its tokens alone."""
        chain = self.chain_weight > 0 and self.chain_rule != "hard"
        return (self.token_weight > 0 and self.divergence != "ce") or chain

    def __call__(
        self,
        draft_logits: Tensor,  # [n, d, V]
        target_logits: Tensor,  # [n, d, V]
        labels: Tensor,  # [n, d]
        acceptance: Tensor | None = None,  # [d], of the whole batch, where `needs_acceptance`
        progress: float = 1.0,
    ) -> Tensor:
        """Losses [n]; `progress` is the share of the training that is done."""
        cross_entropies = cache(lambda: losses.cross_entropy(draft_logits, labels))
        parts = []
        if self.token_weight:
            if self.divergence == "ce":
                tokens = cross_entropies()
            elif self.divergence == "lk":
                assert acceptance is not None
                tokens = losses.lk_divergence(draft_logits, target_logits, acceptance, self.lk_eta)
            else:
                tokens = _DIVERGENCES[self.divergence](draft_logits, target_logits)
            if self.position_weights == "dpace":
                weights = losses.dpace_weights(cross_entropies(), labels, self.dpace_alpha) / labels.shape[-1]
            elif self.position_weights == "linear":
                weights = losses.linear_weights(tokens)
            else:
                gamma = self.gamma if self.position_weights == "exponential" else 1.0
                weights = losses.exponential_weights(tokens, gamma)
            parts.append(self.token_weight * (tokens * weights).sum(-1))
        if self.focal_weight:
            errors = losses.first_errors(draft_logits, labels)
            parts.append(self.focal_weight * losses.focal_loss(cross_entropies(), errors))
        if self.chain_weight:
            if self.chain_rule == "hard":
                chain = losses.hard_chain(cross_entropies(), labels)
            else:
                chain = _CHAINS[self.chain_rule](draft_logits, target_logits, labels)
            beta = self.chain_beta * (min(progress / self.chain_warmup, 1.0) if self.chain_warmup else 1.0)
            parts.append(self.chain_weight * losses.chain_loss(chain, self.chain_form, beta))
        return torch.stack(parts).sum(0)


PRESETS = {
    # DART (arXiv 2601.19278), with the decay that did best in the paper.
    "dart": Objective(),
    # "Teaching Diffusion to Speculate Left-to-Right" (arXiv 2606.11552): weights exp(-(t - 1) / 10), focal 0.3, and
    # 40 times the mean chain of 15 tokens.
    "left_to_right": Objective(divergence="ce", gamma=math.exp(-1 / 10), focal_weight=0.3, chain_weight=40 / 15),
    # D-PACE (arXiv 2605.18810).
    "dpace": Objective(divergence="ce", position_weights="dpace"),
    # LK losses (arXiv 2602.23881), weighted as "dart" is, so that the two compare.
    "lk": Objective(divergence="lk"),
}
