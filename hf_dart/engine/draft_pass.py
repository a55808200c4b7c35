"""The head's pass alone on fixed shapes, for calls whose rounds ask the host (`hf_dart.engine.forward`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hf_dart.drafters.dart.drafter import DartHead
from hf_dart.drafters.proposal import Proposal
from hf_dart.engine.cache import FixedDraftCache
from hf_dart.engine.compiling import compiled
from hf_dart.engine.graphs import Capture, Launch
from hf_dart.engine.job import Job
from hf_dart.trees.tree import MAX_DRAFT_LENGTH


class CapturedDraftPass:
    """A head's drafts after texts of up to T tokens, of up to A new positions at once.

    Args:
        job: of a call; others like it may come.
        head: that drafts.
        slots, most: T and A.
        capture: how.

    Attributes:
        state: the head's cache.
        sizes: what was captured, by how many positions are new and how many tokens are drafted.
    """

    def __init__(self, job: Job, head: DartHead, slots: int, most: int, capture: Capture) -> None:
        self._head, self._capture = head, capture
        self.most = _width(most)
        room = -(-(slots + self.most + MAX_DRAFT_LENGTH) // 8) * 8
        with torch.inference_mode(False), torch.no_grad():
            self.state = FixedDraftCache.of(job.draft_state, len(job.rows), room, capture.memory)
        self.sizes: dict[tuple[int, int], SizedPass] = {}

    def load(self, job: Job) -> None:
        """Take over what a call's head has taken in."""
        given = job.draft_state
        self.state.store.clear_from(0)  # what another call left might be NaN
        self.state.store.copy_from(given.store, given.longest)
        self.state.lengths.copy_(given.lengths)

    def __call__(self, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int) -> Proposal:
        """Take in no more than A verified positions, as `Drafter.propose` does, and draft `depth` tokens.

        On a GPU the next launch writes its own in the same place.
        """
        key = _width(next_tokens.shape[1]), depth
        if key not in self.sizes:
            self.sizes[key] = SizedPass(self._head, self.state, *key, features, self._capture)
        proposal = self.sizes[key](features, next_tokens, counts)
        self.state.lengths.add_(counts.to(self.state.lengths.device))
        return proposal


class SizedPass:
    """Drafts of one depth after A new positions, launched on buffers that are filled in before."""

    def __init__(
        self,
        head: DartHead,
        state: FixedDraftCache,
        width: int,
        depth: int,
        like: Tensor,
        capture: Capture,
    ) -> None:
        self._head, self._state, self._depth = head, state, depth
        device, batch = state.lengths.device, len(state.lengths)
        with torch.inference_mode(False), torch.no_grad():
            self._features = torch.zeros(batch, width, like.shape[-1], dtype=like.dtype, device=device)
            self._next_tokens = torch.zeros(batch, width, dtype=torch.long, device=device)
            self._counts = torch.zeros(batch, dtype=torch.long, device=device)
            self._propose()  # what the head makes on first use is there before anything is traced
        run = compiled(self._propose, capture.backend)
        self.launch = Launch(partial(self.step, run), device, capture.pool, partial(self.step, self._propose))

    def _propose(self) -> tuple[Tensor, Tensor]:
        # What it takes in is written after the entries that count, and counts when the draft has been made.
        found = self._head.propose(self._state.ahead(), self._features, self._next_tokens, self._counts, self._depth)
        return found.logits, found.hidden

    def step(self, run: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """What a launch does, by `run`: the pass over the buffers."""
        with torch.inference_mode(False), torch.no_grad():
            self._found = run()

    def __call__(self, features: Tensor, next_tokens: Tensor, counts: Tensor) -> Proposal:
        width = next_tokens.shape[1]
        # After a row's last position anything will do that is a token.
        self._features.zero_()
        self._next_tokens.zero_()
        self._features[:, :width] = features
        self._next_tokens[:, :width] = next_tokens
        self._counts.copy_(counts)
        self.launch()
        return Proposal(*self._found, self._head.draft_vocabulary)


def _width(positions: int) -> int:
    """So many, filled up to a power of two."""
    return 1 << (positions - 1).bit_length()
