"""`LookupDrafter`: copied text alone as the draft."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from hf_dart.drafters.base import Drafter
from hf_dart.trees.config import TreeConfig


class LookupDrafter(Drafter[None]):
    """Drafter of copied text alone: `attach(model)`, then `model.generate(..., assistant=LookupDrafter())`.

    It needs no training and fits every target. It helps where the text repeats the prompt or itself: code,
    summaries, answers that quote.

    Args:
        tree_config: the shape of its trees, of which only `lookup`, `nodes`, `node_cost`, `verify_costs` and
            `level_cost` matter; None is `TreeConfig(draft_cost=0.0)`.
    """

    draft_length = 0
    feature_layers: ClassVar[list[int]] = []

    def __init__(self, tree_config: TreeConfig | None = None) -> None:
        self.tree_config = tree_config or TreeConfig(draft_cost=0.0)
        self.last_stats = None

    def check_target(self, target: nn.Module) -> None:
        """Accept any target: every one can be drafted for by copies."""

    def begin(self, batch_size: int, capacity: int) -> None:
        """Begin a call without a state: the decoding loop keeps the texts."""

    def extend(self, state: None, features: Tensor, next_tokens: Tensor, counts: Tensor) -> None:
        """Take in nothing: the decoding loop keeps the texts."""

    def propose(
        self, state: None, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None = None
    ) -> None:
        """Return no distributions: the tree is made of copies of earlier text alone."""
