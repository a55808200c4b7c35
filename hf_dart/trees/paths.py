"""The nodes of draft trees by path and by depth.

`TreePaths` leads from each node up to the text before the tree, in tensors alone; by `TreeLevels`, what depends on a
node's parent is computed one level after another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hf_dart.trees.tree import DraftTree


@dataclass(frozen=True)
class TreePaths:
    """The paths of trees [B, N], by parents and ancestors of a `DraftTree`; nothing of them is read on the host."""

    parents: Tensor  # [B, N]
    ancestors: Tensor  # [B, N, N]
    _windows: dict[int, Tensor] = field(default_factory=dict)
    _between: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, tree: DraftTree, device: torch.device) -> TreePaths:
        """Move the paths of a tree to `device`."""
        return cls(tree.parents.to(device), tree.ancestors.to(device))

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


class Level(NamedTuple):
    """The M nodes of one depth, in all rows of a batch: tensors [M] each."""

    rows: Tensor
    nodes: Tensor
    parents: Tensor  # places in the level above; of roots, their rows


class TreeLevels(NamedTuple):
    """The nodes of trees [B, N] by depth, empty ones left out."""

    levels: list[Level]  # from the roots on
    order: Tensor  # [B, N] place of each node in all levels, laid one after another; of empty nodes, that of their root

    @classmethod
    def of(cls, tree: DraftTree) -> TreeLevels:
        """Return the levels of a tree, on the CPU."""
        parents, depths = tree.parents.cpu(), tree.depths.cpu()
        rows = torch.arange(len(parents))
        levels = [Level(rows, torch.zeros_like(rows), rows)]
        places = torch.zeros_like(parents)
        places[:, 0] = rows
        order, before = rows[:, None].repeat(1, tree.size), len(rows)
        real = parents >= 0
        for depth in range(1, int(depths.max()) + 1):
            rows, nodes = (real & (depths == depth)).nonzero(as_tuple=True)
            levels.append(Level(rows, nodes, places[rows, parents[rows, nodes]]))
            places[rows, nodes] = torch.arange(len(rows))
            order[rows, nodes] = torch.arange(before, before + len(rows))
            before += len(rows)
        return cls(levels, order)
