"""Random candidates for draft trees, and the paths that a tree holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dart import TreeConfig
from hf_dart.decoding import walk
from hf_dart.decoding.grow import TreeGrower
from hf_dart.decoding.processors import scores_alone
from hf_dart.trees.copies import with_copies
from hf_dart.trees.scores import Candidates, DraftScores
from hf_dart.trees.tree import DraftTree

DrafterScores = DraftScores(TreeConfig())
"""A drafter's scores as they are."""


def paths(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    """The drafted tokens from the root to each real node, by the ancestor masks."""
    real = (tree.parents[row] >= 0).nonzero().flatten().tolist()
    found = [tuple(tree.tokens[row][tree.ancestors[row, node]].tolist()[1:]) for node in real]
    assert len(set(found)) == len(found), "a path occurs twice"
    return set(found)


def candidates_of(
    tokens: Tensor,
    steps: Tensor,
    *,
    history: Tensor | None = None,
    formula: Any = DrafterScores,
    copies: list[tuple[list[int], float]] | None = None,
    deepest: list[int] | None = None,
) -> Candidates:
    """Candidates of B rows, in tensors.

    Args:
        tokens: [B, d, K].
        steps: [B, d, K] log-scores, or [B, d, K, K] of each after each of the depth before.
        history: [B, C]; None are roots 100, 101, ...
        copies: per row its copied tokens and the log-probability of each; they are not yet among `tokens`.
    """
    batch = len(tokens)
    history = torch.arange(100, 100 + batch)[:, None] if history is None else history
    steps = steps[:, :, None] if steps.ndim == 3 else steps
    longest = max((len(copied) for copied, _ in copies or []), default=0)
    copied, chances = torch.full((batch, longest), -1), torch.full((batch, longest), -torch.inf)
    for row, (copy, chance) in enumerate(copies or []):
        copied[row, : len(copy)] = torch.tensor(copy)
        chances[row, : len(copy)] = chance
    if longest:
        tokens, _ = with_copies(tokens, tokens.float(), copied)
        more = 1 if steps.shape[2] > 1 else 0
        steps = torch.nn.functional.pad(steps, (0, 1, 0, more), value=-torch.inf)
    limits = None if deepest is None else torch.tensor(deepest)
    return Candidates(history, tokens, steps, formula, copied, chances, limits)


def random_draft(batch: int, depth: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Candidates [B, d, K], distinct within a depth, and scores [B, d, K, K] of each after each of the depth before."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.rand(batch, depth, 50, generator=generator).argsort(-1)[..., :width]
    steps = (2 * torch.randn(batch, depth, width, width, generator=generator)).log_softmax(-1)
    steps[:, 0] = steps[:, 0, :1]  # the root is before the first
    return tokens, steps


class InTensors(TreeGrower):
    """Grows trees on a CPU as on an accelerator."""

    def _on_host(self, growing: Candidates, weights: Any) -> DraftTree:
        return self._on_device(growing)


WAYS = {"host": TreeGrower, "tensors": InTensors}


def choose_everywhere(patch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, at all nodes of a tree at once, where the processors of a call read scores alone."""
    patch.setattr(walk, "chooses_everywhere", lambda processors, device: scores_alone(processors))


def let_trees_grow_in_tensors(patch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, in all calls."""
    patch.setattr(TreeGrower, "_on_host", InTensors._on_host)
