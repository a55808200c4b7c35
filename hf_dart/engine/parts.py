"""The parts of a round that are compiled, and on a GPU captured: the target's forward over a tree, and a draft."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.drafters.base import Drafter, Proposal
from hf_dart.engine.graphs import Capture
from hf_dart.models.verify import Verifier
from hf_dart.trees.tree import DraftTree

Run = Callable[..., "tuple[Tensor, Tensor]"]


class CapturedForward:
    """The target's forward over trees of N nodes, launched on buffers that are filled in before.

    The verifier's cache is on fixed shapes.
    """

    def __init__(self, verifier: Verifier, batch: int, nodes: int, capture: Capture) -> None:
        self.verifier, self.nodes = verifier, nodes
        device = verifier.cache.lengths.device
        with torch.inference_mode(False), torch.no_grad():
            none = torch.zeros(batch, nodes, dtype=torch.long, device=device)
            alone = torch.eye(nodes, dtype=torch.bool, device=device).repeat(batch, 1, 1)
            self._tree = DraftTree(none, none - 1, none.clone(), alone, max_depth=nodes - 1)
            self._roots = torch.zeros(batch, dtype=torch.long, device=device)
            verifier.cache.prepare(nodes)
        self.launch = capture.launched(self.step, verifier.forward)

    def step(self, run: Run) -> None:
        """Run the forward over the buffers by `run`, as a launch does."""
        with torch.inference_mode(False), torch.no_grad(), self.verifier.takes_trees():
            self._found = run(self._tree, self._roots)

    def __call__(self, tree: DraftTree, limits: list[int] | None) -> tuple[Tensor, Tensor]:
        """Compute logits [B, N, V] and features [B, N, F] of a tree of at most N nodes; see `Verifier`.

        On a GPU the next launch writes its own in the same place; a root's features may wait in `Session`.
        """
        self.verifier.cache.prepare(self.nodes)
        self._roots.copy_(self.verifier.roots(limits))
        wide = tree.padded(self.nodes)
        for name in ("tokens", "parents", "depths", "ancestors"):
            getattr(self._tree, name).copy_(getattr(wide, name))
        self.launch()
        logits, features = self._found
        return logits[:, : tree.size], features.clone() if tree.size == 1 else features[:, : tree.size]


class CapturedDraft:
    """A drafter's pass of one depth after up to `width` new positions, launched on buffers that are filled in before.

    The drafter runs on fixed shapes (`Drafter.fixed_shapes`), as its cache does, and is given features like `like`.
    """

    def __init__(
        self, drafter: Drafter[SlotCache], cache: SlotCache, width: int, depth: int, like: Tensor, capture: Capture
    ) -> None:
        self._drafter, self._cache, self._depth = drafter, cache, depth
        device, batch = cache.lengths.device, len(cache.lengths)
        with torch.inference_mode(False), torch.no_grad():
            self._features = torch.zeros(batch, width, like.shape[-1], dtype=like.dtype, device=device)
            self._next_tokens = torch.zeros(batch, width, dtype=torch.long, device=device)
            self._counts = torch.zeros(batch, dtype=torch.long, device=device)
            self._propose()  # what the drafter makes on first use must exist before tracing
        self.launch = capture.launched(self.step, self._propose)

    def _propose(self) -> tuple[Tensor, Tensor]:
        # New entries are written after the committed ones, and are committed when the draft has been made.
        taken = self._cache.ahead()
        found = self._drafter.propose(taken, self._features, self._next_tokens, self._counts, self._depth)
        assert found is not None
        self._vocabulary = found.vocabulary
        return found.logits, found.hidden

    def step(self, run: Run) -> None:
        """Run the drafting pass over the buffers by `run`, as a launch does."""
        with torch.inference_mode(False), torch.no_grad():
            self._found = run()

    def __call__(self, features: Tensor, next_tokens: Tensor, counts: Tensor) -> Proposal:
        """Take in at most A verified positions and draft, as `Drafter.propose` does."""
        width = next_tokens.shape[1]
        # After a row's last position any valid token will do.
        self._features.zero_()
        self._next_tokens.zero_()
        self._features[:, :width] = features
        self._next_tokens[:, :width] = next_tokens
        self._counts.copy_(counts)
        self.launch()
        self._cache.advance(counts)
        return Proposal(*self._found, self._vocabulary)
