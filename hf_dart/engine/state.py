"""What the rounds of one shape depend on (`Shape`), and what they work on (`State`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_dart.decoding.noise import MAX_LEAD
from hf_dart.engine.memory import Memory
from hf_dart.engine.processing import sees_text
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.tree import MAX_DRAFT_LENGTH

RING = 4
"""Rounds whose tokens are kept for the host."""


@dataclass(frozen=True)
class Shape:
    """All that the tensors of a round depend on, beside the models.

    Attributes:
        batch: B.
        slots: T, the tier.
        tree: how trees grow; its `nodes` is a number, and no copy is longer than the draft.
        vocab_size: V of the target's logits.
        depth: d, the deepest node; 0 where nothing is drafted.
        processors: `processing.key` of the logits processors, which are part of the round.
        sampled: are tokens drawn?
        budget: M, the nodes that all rows share (`budget`); None gives each row N of its own.
    """

    batch: int
    slots: int
    tree: TreeConfig
    vocab_size: int
    depth: int
    processors: tuple[Any, ...] = ()
    sampled: bool = False
    budget: int | None = None

    @property
    def bucket(self) -> int:
        """N: the nodes of a tree, filled up to what attention kernels like."""
        return filled_up(self.tree.nodes or 1)

    @property
    def drafted(self) -> int:
        """Nodes per row, the root included, that are verified on average."""
        return self.tree.nodes or 1 if self.budget is None else self.budget // self.batch

    @property
    def path(self) -> int:
        """A: the most nodes that a round accepts, the root included."""
        return min(self.depth + 1, self.tree.nodes or 1)

    @property
    def noise_rows(self) -> int:
        """Positions whose noise is held: those of the rounds that may be under way, and of a tree after them.

        Rows of a batch may run ahead of the slowest one, as far as in the eager round.
        """
        ahead = MAX_LEAD if self.batch > 1 and self.path > 1 else 0
        return max(RING * self.path, ahead) + self.depth + 1 if self.sampled else 0

    @property
    def drafts(self) -> bool:
        """Is anything drafted?"""
        return self.bucket > 1

    @property
    def draft_slots(self) -> int:
        """Slots of the head's cache: those of the text, a round's new entries and its mask slots."""
        return -(-(self.slots + self.path + MAX_DRAFT_LENGTH) // 8) * 8


def filled_up(nodes: int) -> int:
    """A size that attention kernels like."""
    return nodes if nodes == 1 else -(-nodes // 8) * 8


def most_nodes(depth: int, config: TreeConfig, vocab_size: int) -> int:
    """How many nodes, the root included, `grow_in_tensors` finds at most for so many drafts."""
    if depth == 0:
        return 1
    width = min(config.top_k, vocab_size) + (config.lookup > 0)
    nodes, paths = 1 + width, width
    for _ in range(depth - 1):
        paths = width * min(config.beam, paths)
        nodes += paths
    return nodes


@dataclass
class State:
    """What a round finds and leaves, all on the device.

    Attributes:
        roots: [B] the last committed tokens.
        emitted, limits: [B] tokens generated so far, and how many may be.
        ended: [B] rows that stand still.
        ends: [V] which tokens end a row.
        features, next_tokens, counts: [B, A, F], [B, A], [B]: what the last round accepted, for the head.
        ring: [RING, B, A + 1] the tokens of the last rounds, and in the last column how many they are.
        turn: [] the number of the coming round.
        noise: [M, B, V] Exp(1) noise of output position p in row p % M, where tokens are drawn.
        ready: [] the first output position whose noise is not there yet.
        seen: [B, V] tokens that a row's text holds, where a penalty asks for them.
    """

    roots: Tensor
    emitted: Tensor
    limits: Tensor
    ended: Tensor
    ends: Tensor
    features: Tensor
    next_tokens: Tensor
    counts: Tensor
    ring: Tensor
    turn: Tensor
    noise: Tensor
    ready: Tensor
    seen: Tensor

    @classmethod
    def empty(cls, shape: Shape, features: Tensor, memory: Memory) -> State:
        """Of rows that have all ended, with features like `features` [..., F]."""
        device, batch, path = features.device, shape.batch, shape.path

        def zeros(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            roots=zeros(batch),
            emitted=zeros(batch),
            limits=zeros(batch),
            ended=~zeros(batch, dtype=torch.bool),
            ends=zeros(shape.vocab_size, dtype=torch.bool),
            features=zeros(batch, path, features.shape[-1], dtype=features.dtype),
            next_tokens=zeros(batch, path),
            counts=zeros(batch),
            ring=zeros(RING, batch, path + 1),
            turn=zeros(),
            noise=memory.zeros("noise", (shape.noise_rows, batch, shape.vocab_size), torch.float32, device).add_(1),
            ready=zeros(),
            seen=zeros(batch, shape.vocab_size if sees_text(shape.processors) else 0, dtype=torch.bool),
        )
