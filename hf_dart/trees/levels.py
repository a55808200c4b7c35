"""The nodes of draft trees, depth by depth: what depends on a node's parent is computed one level after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dart.trees.tree import DraftTree


@dataclass(frozen=True)
class Level:
    """The M nodes of one depth, in all rows of a batch.

    Attributes:
        rows, nodes: [M] each.
        parents: [M] places of their parents in the level above; of roots, their rows.
    """

    rows: Tensor
    nodes: Tensor
    parents: Tensor


@dataclass(frozen=True)
class TreeLevels:
    """The nodes of trees [B, N] by depth, empty ones left out. Its tensors lie on the CPU, unless moved (`to`).

    Attributes:
        levels: from the roots on.
        order: [B, N] place of each node in all levels, laid one after another; of empty nodes, that of their root.
    """

    levels: list[Level]
    order: Tensor

    @classmethod
    def of(cls, tree: DraftTree) -> TreeLevels:
        """Return the levels of a tree."""
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

    @property
    def shape(self) -> tuple[int, int]:
        """B and N."""
        return self.order.shape[0], self.order.shape[1]

    def to(self, device: torch.device) -> TreeLevels:
        """Return these levels on `device`."""
        if device.type == "cpu":
            return self
        moved = [Level(one.rows.to(device), one.nodes.to(device), one.parents.to(device)) for one in self.levels]
        return TreeLevels(moved, self.order.to(device))
