"""Draft trees, many guesses that share prefixes, verified in one forward pass of the target; chains, one per row.

By `TreePaths` each node leads up to the text before the tree, in tensors alone; by `TreeLevels`, what depends on a
node's parent is computed one level after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MAX_DRAFT_LENGTH = 31
"""Longest draft: with its bonus token a round commits at most 32 tokens, the bound on the noise queue."""

STEP = 1e-4
"""A child's score lies at least this much below its parent's, so that the best N nodes always hold whole paths."""


@dataclass(frozen=True)
class DraftTree:
    """N nodes per row in topological order; node 0 is the root, the last committed token.

    Attributes:
        scores: [B, N] log-chance of each path, if it was grown by them; 0 for the root, -inf for empty nodes.
    """

    tokens: Tensor  # [B, N]
    parents: Tensor  # [B, N] node index; -1 for the root and for empty nodes, which match nothing
    depths: Tensor  # [B, N]; 0 for the root and for empty nodes
    ancestors: Tensor  # [B, N, N] bool; entry (i, j) says that j lies on the path from the root to i, i included
    max_depth: int  # no node lies deeper
    scores: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of nodes per row, N."""
        return self.tokens.shape[1]

    def to(self, device: torch.device) -> DraftTree:
        """Move the tree to `device`, where nobody asks for its scores, which Apple GPUs could not hold."""
        return replace(self, scores=None)._each(lambda tensor: tensor.to(device))

    def row(self, row: int) -> DraftTree:
        """Return the tree of one row."""
        return self._each(lambda tensor: tensor[row : row + 1])

    def _each(self, change: Callable[[Tensor], Tensor]) -> DraftTree:
        """Return a tree of all tensors changed alike."""
        changed: Any = {name: change(part) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **changed)

    def padded(self, size: int) -> DraftTree:
        """Add empty nodes up to `size`; they attend to themselves alone and match nothing."""
        more = size - self.size
        if more == 0:
            return self

        def pad(tensor: Tensor, value: float) -> Tensor:
            return torch.nn.functional.pad(tensor, (0, more), value=value)

        tokens = torch.cat([self.tokens, self.tokens[:, :1].expand(-1, more)], dim=1)
        ancestors = torch.nn.functional.pad(self.ancestors, (0, more, 0, more))
        ancestors = ancestors | torch.eye(size, dtype=torch.bool, device=tokens.device)
        scores = None if self.scores is None else pad(self.scores, -inf)
        return DraftTree(tokens, pad(self.parents, -1), pad(self.depths, 0), ancestors, self.max_depth, scores)

    @classmethod
    def from_parents(cls, tokens: Tensor, parents: Tensor, scores: Tensor | None = None) -> DraftTree:
        """Fill in depths and ancestors of `tokens`, `parents` [B, N]."""
        (rows, size), width = parents.shape, (parents.shape[1] + 7) // 8
        bits, depths = bytearray(), list[list[int]]()
        for above in parents.tolist():
            paths, levels = list[int](), list[int]()  # of each node, the bits of those on its path, and its depth
            for node, parent in enumerate(above):
                paths.append(1 << node | (paths[parent] if parent >= 0 else 0))
                levels.append(levels[parent] + 1 if parent >= 0 else 0)
            bits += b"".join(path.to_bytes(width, "little") for path in paths)
            depths.append(levels)
        packed = np.frombuffer(bits, np.uint8).reshape(rows, size, width)
        ancestors = torch.from_numpy(np.unpackbits(packed, axis=-1, count=size, bitorder="little").view(bool))
        device, deepest = tokens.device, max(map(max, depths))
        return cls(tokens, parents, torch.tensor(depths, device=device), ancestors.to(device), deepest, scores)

    @classmethod
    def chain(cls, tokens: Tensor, counts: Tensor | None = None) -> DraftTree:
        """One path per row: tokens [B, N], of which the first `counts` [B] are real and the rest empty."""
        batch, nodes = tokens.shape
        if nodes == 1 and counts is None:
            none = torch.zeros_like(tokens)
            return cls(tokens, none - 1, none, torch.ones_like(tokens, dtype=torch.bool)[..., None], 0, none.float())
        index = torch.arange(nodes, device=tokens.device)
        real = (index < counts[:, None]) if counts is not None else index.expand(batch, -1) >= 0
        lower = index[:, None] >= index
        ancestors = (lower & real[:, None, :] & real[:, :, None]) | (index[:, None] == index)
        return cls(tokens, torch.where(real, index - 1, -1), torch.where(real, index, 0), ancestors, nodes - 1)


def after_draft(draft: Tensor, scores: Tensor, candidates: Tensor, steps: Tensor) -> Tensor:
    """Put scores of candidates after a draft's own tokens [B, d] in the place of others: [B, d, W, W].

    They are `scores` [B, d, K] of the first K of the candidates [B, d, W], those that are not copied; the others are
    `steps` [B, d, W or 1, W], scores after each candidate of the depth before, or after any.
    """
    more = candidates.shape[-1] - scores.shape[-1]
    scores = torch.nn.functional.pad(scores, (0, more), value=-inf)
    drafted = torch.zeros_like(candidates, dtype=torch.bool)  # True if the candidate before is the draft's
    drafted[:, 1:] = candidates[:, :-1] == draft[:, :-1, None]
    return torch.where(drafted[..., None], scores[:, :, None], steps)


def best_chain(candidates: Tensor, steps: Tensor) -> Tensor:
    """Return the tokens [B, d], of candidates [B, d, K], of the path that takes the best step at every depth.

    `steps` [B, d, J, K] are scores of candidate k after candidate j of the depth before; J is 1 where j does not count.
    """
    columns = steps[:, 0, 0].argmax(-1)  # [B]
    path = [columns]
    for after in steps[:, 1:].unbind(1):
        row = columns if after.shape[1] > 1 else torch.zeros_like(columns)
        columns = after.gather(1, row[:, None, None].expand(-1, 1, after.shape[-1]))[:, 0].argmax(-1)
        path.append(columns)
    return candidates.gather(2, torch.stack(path, dim=1)[..., None])[..., 0]


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
