"""The drafter's side of one call: what it has read, what waits to be read, and its last draft."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_dart.decoding.pace import PAUSE
from hf_dart.decoding.rows import Rows
from hf_dart.decoding.turns import DrafterState
from hf_dart.drafters.base import Drafter
from hf_dart.drafters.proposal import Proposal, Score, Verified

ProposeFunction = Callable[[Any, Tensor, Tensor, Tensor, "int | None", Score], "Proposal | None"]
"""`Drafter.propose_ranked`, or a captured pass in its place."""


@dataclass
class DrafterRunner:
    """Runner of the drafter: hands it verified positions, and asks it for drafts in rounds that are to have one.

    Attributes:
        drafter: what drafts.
        drafter_state: its state, and what of the text that covers.
        propose_with: how it is asked for a draft.
        depth: tokens of a draft.
        rows: the text of each row.
        aside: is entered around what the drafter does, which may draw: where tokens are drawn from the default
            generator, it moves nothing.
        keeps: positions are to be kept for the drafter even if it will not be asked in this call.
        pending: verified positions that it has not read, rounds having had no draft.
    """

    drafter: Drafter[Any]
    drafter_state: DrafterState
    propose_with: ProposeFunction
    depth: int
    rows: Rows
    aside: Callable[[], AbstractContextManager[None]]
    keeps: bool
    pending: list[Verified] = field(default_factory=list)

    def propose(self, seen: Verified, mode: str, score: Score) -> Proposal | None:
        """Return the next draft; None if the round is to have none, or there is none.

        Args:
            seen: the positions that the last round verified.
            score: how the tree will rank the drafter's candidates.
            mode: how this round is drafted, one of `pace.MODES`.
        """
        if self.keeps:
            self.pending.append(seen)
        if mode == PAUSE:
            return None
        features, next_tokens, counts = joined(self.pending)
        self.pending = []
        with self.aside():
            state = self.drafter_state.state
            proposal = self.propose_with(state, features, next_tokens, counts, self.depth, score)
        if proposal is not None:
            self._hold_ended_rows(proposal)
        return proposal

    def refine(self, first: Proposal, tokens: Tensor) -> Proposal:
        """Return the draft after a second look at `tokens` [B, d] of the `first` one."""
        with self.aside():
            proposal = self.drafter.refine(self.drafter_state.state, first, tokens)
        self._hold_ended_rows(proposal)
        return proposal

    def _hold_ended_rows(self, proposal: Proposal) -> None:
        """Rows that are only filled up must not hold up the others."""
        if self.rows.in_step and self.rows.fills_up and True in self.rows.ended:
            proposal.force_token(self.rows.ended, self.rows.pad)


def joined(chunks: list[Verified]) -> Verified:
    """One chunk of all, each row's real entries in front."""
    if len(chunks) == 1:
        return chunks[0]
    features = torch.cat([chunk.features for chunk in chunks], dim=1)
    tokens = torch.cat([chunk.next_tokens for chunk in chunks], dim=1)
    real = torch.cat([torch.arange(chunk.next_tokens.shape[1]) < chunk.counts[:, None] for chunk in chunks], dim=1)
    order = real.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
    gathered = features.gather(1, order.to(features.device)[..., None].expand_as(features))
    return Verified(gathered, tokens.gather(1, order.to(tokens.device)), real.sum(1))
