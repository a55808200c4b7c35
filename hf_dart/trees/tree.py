"""Draft trees: many guesses that share prefixes, verified in one forward pass of the target."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

import torch
from torch import Tensor

# A child's score lies this much below its parent's, so that the best N nodes always hold whole paths. No step is
# deeper than the floor: on sums beyond a thousand, float32 could not tell such small steps.
STEP, FLOOR = 1e-4, -30.0


def bounded(steps: Tensor) -> Tensor:
    """Log-scores as steps down a tree: between the floor and -STEP, or -inf where there is no node (also for nan)."""
    return torch.where(steps > -inf, steps.clamp(min=FLOOR, max=-STEP), -inf)
MAX_DRAFT_LENGTH = 31
"""Longest draft: with its bonus token a round commits at most 32 tokens, the bound on the noise queue."""


@dataclass(frozen=True)
class DraftTree:
    """N nodes per row in topological order; node 0 is the root, the last committed token.

    Attributes:
        tokens: [B, N].
        parents: [B, N] node index; -1 for the root and for empty nodes, which match nothing.
        depths: [B, N]; 0 for the root and for empty nodes.
        ancestors: [B, N, N] bool; entry (i, j) says that j lies on the path from the root to i, i included.
        max_depth: no node lies deeper.
        scores: [B, N] log-chance of each path, if it was grown by them; 0 for the root, -inf for empty nodes.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    max_depth: int
    scores: Tensor | None = None

    @property
    def size(self) -> int:
        """N."""
        return self.tokens.shape[1]

    def to(self, device: torch.device) -> DraftTree:
        """The same tree on `device`."""
        tensors = (self.tokens, self.parents, self.depths, self.ancestors)
        tokens, parents, depths, ancestors = (tensor.to(device) for tensor in tensors)
        # Apple GPUs have no float64.
        scores = self.scores if self.scores is None or device.type != "mps" else self.scores.float()
        scores = None if scores is None else scores.to(device)
        return DraftTree(tokens, parents, depths, ancestors, self.max_depth, scores)

    def padded(self, size: int) -> DraftTree:
        """The same tree, with empty nodes up to `size`; they see themselves alone and match nothing."""
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
    def from_parents(
        cls, tokens: Tensor, parents: Tensor, max_depth: int, scores: Tensor | None = None
    ) -> DraftTree:
        """Fill in depths and ancestors of `tokens`, `parents` [B, N]; no path is longer than `max_depth`."""
        nodes = tokens.shape[1]
        one_step = torch.eye(nodes, device=tokens.device).expand(*tokens.shape, -1)
        links = (parents[..., None] == torch.arange(nodes, device=tokens.device)).to(one_step.dtype)
        reach = one_step + links
        steps = 1
        while steps < max_depth:  # squaring doubles how many steps up `reach` looks
            reach = (reach @ reach).clamp(max=1)
            steps *= 2
        ancestors = reach > 0
        return cls(tokens, parents, ancestors.sum(-1) - 1, ancestors, max_depth, scores)

    @classmethod
    def chain(cls, tokens: Tensor, counts: Tensor | None = None) -> DraftTree:
        """One path per row: tokens [B, N], of which the first `counts` [B] are real and the rest empty."""
        batch, nodes = tokens.shape
        if nodes == 1 and counts is None:
            none = torch.zeros_like(tokens)
            return cls(tokens, none - 1, none, torch.ones_like(tokens, dtype=torch.bool)[..., None], 0)
        index = torch.arange(nodes, device=tokens.device)
        real = (index < counts[:, None]) if counts is not None else index.expand(batch, -1) >= 0
        lower = index[:, None] >= index
        ancestors = (lower & real[:, None, :] & real[:, :, None]) | (index[:, None] == index)
        return cls(
            tokens,
            torch.where(real, index - 1, -1),
            torch.where(real, index, 0),
            ancestors,
            nodes - 1,
        )


@dataclass
class Beam:
    """The W best paths while a tree grows.

    Attributes:
        history: [B, C] last committed tokens; the last is the root.
        candidates: [B, d, K] token ids per depth.
        columns: per depth so far, [B, W] which candidate each path ends in.
        origins: per depth so far, [B, W] which path of the depth before it extends.
    """

    history: Tensor
    candidates: Tensor
    columns: list[Tensor]
    origins: list[Tensor]

    @property
    def depth(self) -> int:
        """Depth of the candidates that come next, from 0."""
        return len(self.columns)

    @property
    def last(self) -> Tensor:
        """[B, W] column of each path's last token; 0 for the root."""
        return self.columns[-1] if self.columns else torch.zeros_like(self.history[:, -1:])

    def paths(self, last: int | None = None) -> Tensor:
        """[B, W, C + depth] the tokens of each path, the committed ones in front; only the `last` ones if given."""
        committed = self.history.shape[1]
        last = committed + self.depth if last is None else last
        row = torch.arange(self.last.shape[1], device=self.last.device).expand_as(self.last)
        drafted = []
        for depth in reversed(range(max(self.depth - last, 0), self.depth)):
            column = self.columns[depth].gather(1, row)
            drafted.append(self.candidates[:, depth].gather(1, column))
            row = self.origins[depth].gather(1, row)
        history = self.history[:, max(committed + self.depth - last, 0) :]
        history = history[:, None].expand(-1, self.last.shape[1], -1)
        return torch.cat([history, *(tokens[..., None] for tokens in reversed(drafted))], dim=-1)


class Scorer(Protocol):
    """Makes a candidate's score depend on the path that it would extend (n-gram, learned selector, ...)."""

    def __call__(self, beam: Beam, scores: Tensor) -> Tensor:
        """Log-scores [B, W, K], at most 0, of the candidates at depth `beam.depth` behind each path.

        Args:
            beam: the paths.
            scores: [B, K] log-probability of the candidates by the drafter alone.
        """
        ...


@dataclass(frozen=True)
class Transitions:
    """The [`Scorer`] of first-order scores: what a candidate is worth behind each candidate in front of it.

    Attributes:
        table: [B, d, K, K], entry (i, j, k) for candidate k of depth i behind candidate j of depth i - 1.
    """

    table: Tensor

    def __call__(self, beam: Beam, scores: Tensor) -> Tensor:
        last = beam.last[..., None].expand(-1, -1, scores.shape[-1])
        return self.table[:, beam.depth].gather(1, last)


def grow_tree(
    history: Tensor,
    candidates: Tensor,
    scores: Tensor,
    *,
    nodes: int,
    beam: int,
    depth_limit: Tensor | None = None,
    scorer: Scorer | None = None,
) -> DraftTree:
    """Grow one tree per row from d candidate lists: depth by depth, then the best N of all nodes seen.

    At each depth the `beam` best paths are extended by all K candidates; every extension enters one pool,
    and the nodes with the largest cumulative score form the tree (DART, section 3.3; OPT-Tree and DDTree
    pose the same problem). Width 1 gives a chain.

    Args:
        history: [B, C] last committed tokens, C >= 1; the last one is the root.
        candidates: [B, d, K] token ids, best first.
        scores: [B, d, K] log-probability of each to be the target's token at its depth.
        nodes: N, the root included; less where d and K yield fewer.
        beam: W.
        depth_limit: [B] deepest node allowed per row; d where left out.
        scorer: replaces `scores` by scores that depend on the path.

    Returns:
        The tree, on the device of `candidates`, of the same N for the same d, K, W.
    """
    batch, depth, width = candidates.shape
    device = candidates.device
    root = history[:, -1:]
    if nodes == 1 or depth == 0:
        return DraftTree.chain(root)
    scores = bounded(scores.float())
    if depth_limit is not None:
        beyond = torch.arange(1, depth + 1, device=device) > depth_limit[:, None]
        scores = scores.masked_fill(beyond[..., None], -inf)

    pool_scores, pool_tokens, pool_parents = [], [], []
    grown = Beam(history, candidates, [], [])
    best = torch.zeros(batch, 1, device=device)  # [B, W] cumulative scores of the beam
    beam_nodes = torch.full((batch, 1), -1, device=device)  # [B, W] where in the pool the beam lies
    offset = 0
    for i in range(depth):
        step = scores[:, i, None]
        if scorer is not None:
            step = bounded(scorer(grown, step[:, 0]).float())
            if depth_limit is not None:
                step = step.masked_fill((depth_limit <= i)[:, None, None], -inf)
        extended = (best[..., None] + step).flatten(1)  # [B, W * K]
        pool_scores.append(extended)
        pool_tokens.append(candidates[:, i, None].expand(-1, best.shape[1], -1).flatten(1))
        pool_parents.append(beam_nodes[..., None].expand(-1, -1, width).flatten(1))
        if i + 1 == depth:
            break
        best, chosen = extended.topk(min(beam, extended.shape[1]))
        grown.columns.append(chosen % width)
        grown.origins.append(chosen // width)
        beam_nodes = chosen + offset
        offset += extended.shape[1]

    pool = torch.cat(pool_scores, dim=1)
    kept_scores, kept = pool.topk(min(nodes - 1, pool.shape[1]))  # best first, and children lie below their parents
    tokens = torch.cat(pool_tokens, dim=1).gather(1, kept)
    parents = torch.cat(pool_parents, dim=1).gather(1, kept)
    node = torch.arange(1, kept.shape[1] + 1, device=device).expand_as(kept)
    node_of = torch.zeros_like(pool, dtype=torch.long).scatter_(1, kept, node)
    parents = torch.where(parents < 0, 0, node_of.gather(1, parents.clamp(min=0)))
    empty = kept_scores == -inf
    parents, tokens = parents.masked_fill(empty, -1), torch.where(empty, root, tokens)
    return DraftTree.from_parents(
        torch.cat([root, tokens], dim=1),
        torch.cat([torch.full_like(root, -1), parents], dim=1),
        depth,
        torch.cat([torch.zeros_like(kept_scores[:, :1]), kept_scores], dim=1),
    )
