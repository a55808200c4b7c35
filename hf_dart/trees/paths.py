"""The paths of draft trees, from each node up to the text before the tree, in tensors alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_dart.trees.tree import DraftTree


@dataclass(frozen=True)
class TreePaths:
    """The paths of trees [B, N]; nothing of them is read on the host.

    Attributes:
        parents: [B, N]; -1 for roots and empty nodes.
        ancestors: [B, N, N] bool, as those of a `DraftTree`.
    """

    parents: Tensor
    ancestors: Tensor
    _windows: dict[int, Tensor] = field(default_factory=dict)
    _between: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, tree: DraftTree, device: torch.device) -> TreePaths:
        """Return the paths of a tree, on `device`."""
        return cls(tree.parents.to(device), tree.ancestors.to(device))

    @property
    def shape(self) -> tuple[int, int]:
        """B and N."""
        return self.parents.shape[0], self.parents.shape[1]

    def windows(self, width: int) -> Tensor:
        """[B, N, W] places of the last W entries before each node, among W of the text and the N nodes after them."""
        if width not in self._windows:
            place, steps = self.parents, []
            for _ in range(width):
                steps.append(width + place)
                # Above a root come the entries of the text, from the last one backwards: -1, -2, ...
                above = self.parents.gather(1, place.clamp(min=0))
                place = torch.where(place >= 0, above, place - 1)
            self._windows[width] = torch.stack(steps[::-1], dim=-1)
        return self._windows[width]

    @property
    def between(self) -> Tensor:
        """[B, N, N, N] bool; entry (i, j, m) says that m lies on the path to i, but not on that to j."""
        if not self._between:
            self._between.append(self.ancestors[:, :, None] & ~self.ancestors[:, None])
        return self._between[0]
