"""The loss of a training run, put together from `losses`, and its presets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hf_dart.errors import check_fields
from hf_dart.training.objective import losses

_CHOICES = {
    "divergence": ("ce", "kl", "tv", "lk"),
    "position_weights": ("uniform", "exponential", "dpace"),
    "chain_form": ("linear", "log"),
}


@dataclass(frozen=True)
class Objective:
    """token_weight * weighted divergence + focal_weight * focal loss + chain_weight * chain loss, per block.

    Raises:
        ValueError: a field is out of range.
    """

    # Of a draft token from its target: "ce" (cross-entropy with the true token), "kl", "tv" (total variation), "lk"
    # (from KL to total variation as the draft gets better).
    divergence: str = "kl"
    ce_share: float = 0.0  # of the cross-entropy in the divergence, in [0, 1]
    position_weights: str = "exponential"  # or "uniform", which sum to 1, or "dpace", whose sum is divided by d
    gamma: float = 0.6  # of exponential weights, in (0, 1]
    dpace_alpha: float = 0.5  # smoothing of the D-PACE weights, in [0, 1]
    lk_eta: float = 3.0  # how fast "lk" leaves KL for total variation
    token_weight: float = 1.0
    focal_weight: float = 0.0
    chain_weight: float = 0.0  # of the linear form, per expected token
    chain_form: str = "linear"  # or "log", as for `losses.chain_loss`

    def __post_init__(self) -> None:
        check_fields(self, choices=_CHOICES, shares=("ce_share", "dpace_alpha"))
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma}; give a number in (0, 1].")
        for name in ("lk_eta", "token_weight", "focal_weight", "chain_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number of 0 or more.")
        if not (self.token_weight or self.focal_weight or self.chain_weight):
            raise ValueError("token_weight, focal_weight and chain_weight are all 0; nothing would be trained.")

    @property
    def needs_acceptance(self) -> bool:
        """True if the mean acceptance of the batch has to be known before its losses."""
        return self.divergence == "lk" and self.token_weight > 0

    @property
    def needs_target(self) -> bool:
        """True if the target's distributions matter, and not its tokens alone."""
        return self.divergence != "ce" and self.token_weight > 0

    def __call__(
        self,
        draft_logits: Tensor,  # [n, d, V]
        target_logits: Tensor,  # [n, d, V]
        labels: Tensor,  # [n, d]
        acceptance: Tensor | None = None,  # [d], of the whole batch, where `needs_acceptance`
    ) -> Tensor:
        """Losses [n]."""
        cross_entropies = cache(lambda: losses.cross_entropy(draft_logits, labels))
        parts = []
        if self.token_weight:
            if self.divergence == "ce":
                tokens = cross_entropies()
            elif self.divergence == "kl":
                tokens = losses.kl_divergence(draft_logits, target_logits)
            elif self.divergence == "tv":
                tokens = losses.total_variation(draft_logits, target_logits)
            else:
                assert acceptance is not None
                tokens = losses.lk_divergence(draft_logits, target_logits, acceptance, self.lk_eta)
            if self.ce_share:
                tokens = (1 - self.ce_share) * tokens + self.ce_share * cross_entropies()
            if self.position_weights == "dpace":
                weights = losses.dpace_weights(cross_entropies(), labels, self.dpace_alpha) / labels.shape[-1]
            else:
                gamma = self.gamma if self.position_weights == "exponential" else 1.0
                weights = losses.exponential_weights(tokens, gamma)
            parts.append(self.token_weight * (tokens * weights).sum(-1))
        if self.focal_weight:
            errors = losses.first_errors(draft_logits, labels)
            parts.append(self.focal_weight * losses.focal_loss(cross_entropies(), errors))
        if self.chain_weight:
            chain = losses.hard_chain(cross_entropies(), labels)
            parts.append(self.chain_weight * losses.chain_loss(chain, self.chain_form))
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
    # Mostly the chance of a rejection, as DSpark's and DFlash2's heads learn; cross-entropy leads where that is flat.
    "tv": Objective(divergence="tv", ce_share=0.1),
}
