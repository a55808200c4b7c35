"""Muon (arXiv 2502.16982), whose steps change a matrix alike in all directions, for the matrices of a drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MUON: dict[str, Any] = {"momentum": 0.8, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}


def matrix_names(drafter: nn.Module) -> list[str]:
    """Names of the weights that Muon is for: those of linear layers that require gradients, but for an LM head's."""
    layers = (f"{name}.weight" for name, layer in drafter.named_modules() if isinstance(layer, nn.Linear))
    return [name for name in layers if drafter.get_parameter(name).requires_grad and not name.startswith("lm_head.")]


class MuonAndOther(torch.optim.Optimizer):
    """Muon for some matrices and another optimizer, which has its own weights, as one."""

    def __init__(self, matrices: list[Tensor], rate: float, weight_decay: float, other: torch.optim.Optimizer) -> None:
        self._muon, self._other = torch.optim.Muon(matrices, rate, weight_decay, **MUON), other
        super().__init__([{"params": matrices}], {})
        self._take_groups()

    def _take_groups(self) -> None:
        self.param_groups = [*self._other.param_groups, *self._muon.param_groups]  # logged is the first one's rate

    def step(self, closure: Any = None) -> Any:
        """Take a step of both."""
        loss = self._muon.step(closure)
        self._other.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both."""
        return {"muon": self._muon.state_dict(), "other": self._other.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the states of both."""
        self._muon.load_state_dict(state_dict["muon"])
        self._other.load_state_dict(state_dict["other"])
        self._take_groups()
