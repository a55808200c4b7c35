"""Drafting token by token: after each of the best tokens of a depth comes a distribution of its own.

A drafter that reads one token after the other drafts d tokens in d passes. Each pass reads the best W tokens of the one
before it, side by side, so that the drafts branch (EAGLE-2, arXiv 2406.16858, grows its trees so).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, Self

import torch
from torch import Tensor

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.drafters.base import Drafter, Proposal, Score, State, Verified, entries_of
from hf_dart.models.verify import MaskKind


@dataclass(frozen=True, kw_only=True)
class BeamProposal(Proposal):
    """A draft that branches: after each of W tokens per depth it has a distribution of its own.

    Its `logits` [B, d, V] are log-probabilities, summed over the branches.
    """

    branches: Tensor  # [B, d - 1, W] tokens of depths 1 to d - 1 that were drafted on from, different ones per depth
    conditional: Tensor  # [B, d - 1, W, V] log-probabilities of the next depth after each of them

    def within(self, vocab_size: int) -> Self:
        return replace(super().within(vocab_size), conditional=self.conditional[..., :vocab_size])

    def force_token(self, rows: list[bool], token: int) -> None:
        super().force_token(rows, token)
        which = torch.tensor(rows, device=self.logits.device)
        self.branches[which] = token
        self.conditional[which] = self.logits[which, 1:, None].log_softmax(-1)

    def transitions(self, candidates: Tensor, scores: Tensor) -> Tensor:
        """Return `Drafter.transitions` of these: what was drafted after each branch."""
        width, device, own = scores.shape[-1], scores.device, self.logits.device
        candidates, scores = candidates.to(own), scores.to(own)
        first = scores[:, :1, None].expand(-1, 1, width, -1)
        depth = scores.shape[1] - 1
        columns = candidates[:, 1:].clamp(min=0)  # [B, d - 1, K]
        alone = self.logits[:, 1 : depth + 1].gather(-1, columns).clamp(min=-1e30)  # -inf - -inf is nan
        wide = columns[:, :, None].expand(-1, -1, self.branches.shape[-1], -1)
        following = self.conditional[:, :depth].gather(-1, wide)  # [B, d - 1, W, K]
        # Scores may include noise and the target's temperature: the branch's change is added, and the candidates
        # together keep the probability that the draft gave them.
        together = scores[:, 1:].logsumexp(-1, keepdim=True)[:, :, None]
        shares = (scores[:, 1:, None] + following - alone[:, :, None]).log_softmax(-1) + together
        same = candidates[:, :-1, :, None] == self.branches[:, :depth, None]  # [B, d - 1, K, W]
        table = shares.gather(2, same.int().argmax(-1)[..., None].expand(-1, -1, -1, width))
        table = table.masked_fill(~same.any(-1)[..., None], -inf)
        return torch.cat([first, table], dim=1).to(device)


@dataclass(frozen=True)
class View:
    """Slots and positions of one forward's entries, and the mask of what they attend to."""

    positions: Tensor  # [B, Q]
    slots: Tensor  # [B, Q] that they are written to
    seen: Tensor  # [B, Q, S] bool, which of the first S slots each attends to
    at: Tensor  # [B, S] the positions of those

    @classmethod
    def after(cls, state: SlotCache, entries: int) -> View:
        """Return the view of `entries` after the verified ones of a cache, each attending to all up to itself."""
        state.forget(entries)
        lengths = state.lengths
        positions = lengths[:, None] + torch.arange(entries, device=lengths.device)
        slots = torch.arange(state.longest + entries, device=lengths.device)
        return cls(positions, positions, slots <= positions[..., None], slots.expand(len(lengths), -1))

    @classmethod
    def of_level(cls, state: SlotCache, level: int, sees: Tensor) -> View:
        """Return the view of W tokens drafted at depth `level`, which attend to verified ones and to their path.

        Drafted entries of each level follow the verified ones, W by W; `sees` is as for `BeamDrafter.draft_level`.
        """
        lengths = state.lengths
        sees = sees.to(lengths.device)
        batch, width, entries = sees.shape
        drafted = torch.arange(entries, device=lengths.device)
        slots = lengths[:, None] + drafted
        every = torch.arange(state.longest + entries, device=lengths.device).expand(batch, -1)
        seen = (every < lengths[:, None])[:, None].repeat(1, width, 1)
        seen.scatter_(2, slots[:, None].expand(-1, width, -1), sees)
        at = every.scatter(1, slots, lengths[:, None] + drafted // width)
        positions = (lengths + level - 1)[:, None].expand(-1, width)
        return cls(positions, slots[:, -width:], seen, at)

    def masks(self, kinds: Sequence[MaskKind], dtype: torch.dtype, device: torch.device) -> Any:
        """Additive masks [B, 1, Q, S]: one for models with one kind of layers, else a dict of them."""
        masks = {kind.name: kind.mask(self.seen, self.at, self.positions, dtype).to(device) for kind in kinds}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def enter(self, cache: SlotCache, device: torch.device) -> None:
        """Let the next forward with `cache` write to these slots."""
        cache.place(self.slots.to(device), self.seen.shape[-1])


class BeamDrafter(Drafter[State]):
    """A drafter that is asked for one pass at a time, over `beam` tokens of each depth; 1 drafts a chain."""

    beam: int

    def passes(self, depth: int) -> int:
        """Return the number of passes of the network for a draft of `depth` tokens."""
        return depth

    def extend(self, state: State, features: Tensor, next_tokens: Tensor, counts: Tensor) -> None:
        for part in Verified(features, next_tokens, counts).parts(self.at_once):
            self.read_last(state, *part)

    @abstractmethod
    def read_last(self, state: State, features: Tensor, next_tokens: Tensor, counts: Tensor) -> Tensor | None:
        """Take in verified positions, as `extend`; states [B, 1, H] of each row's last one; None drafts nothing."""

    @abstractmethod
    def draft_level(self, state: State, tokens: Tensor, previous: Tensor, level: int, sees: Tensor) -> Tensor:
        """One pass over W drafted tokens [B, W] of depth `level`, from 1: their states [B, W, H].

        `previous` [B, W, H] are the states that drafted them, and `sees` [B, W, level W] says which entries of this
        draft lie on the path to each, itself included.
        """

    @abstractmethod
    def log_chances(self, states: Tensor) -> Tensor:
        """Log-probabilities [B, W, V] of the token after each of the states [B, W, H]."""

    def propose(
        self, state: State, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None = None
    ) -> Proposal | None:
        return self.propose_ranked(state, features, next_tokens, counts, depth, lambda _, logits: logits)

    def propose_ranked(
        self, state: State, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None, score: Score
    ) -> Proposal | None:
        """Take in verified positions and draft a beam: what is drafted on from are the tokens that `score` best."""
        last = self.read_ahead(state, Verified(features, next_tokens, counts))
        states = self.read_last(state, *last)  # [B, 1, H]
        if states is None:
            return None
        follow, depth = partial(self.draft_level, state), depth or self.draft_length
        return draft_beam(states, lambda level, states: self.log_chances(states), follow, self.beam, depth, score)

    def transitions(self, proposal: Proposal, roots: Tensor, candidates: Tensor, scores: Tensor) -> Tensor | None:
        """Return the scores drafted after each branch; tokens that were not drafted on from get no children."""
        return proposal.transitions(candidates, scores) if isinstance(proposal, BeamProposal) else None


def draft_beam(
    states: Tensor,  # [B, 1, H] of the last verified positions
    log_chances: Callable[[int, Tensor], Tensor],  # of a depth, from 0, and its states [B, W, H]: [B, W, V]
    draft_level: Callable[[Tensor, Tensor, int, Tensor], Tensor],  # as `BeamDrafter.draft_level`, without its state
    beam: int,
    depth: int,
    score: Score,
) -> Proposal:
    """Draft a beam: what is drafted on from at each depth are the tokens that `score` best."""
    chances = log_chances(0, states)  # [B, 1, V]
    marginal, hidden = [chances[:, 0]], [states[:, 0]]
    branches, conditional = [], []
    width = min(beam, chances.shape[-1])
    scores, tokens = score(0, chances)[:, 0].topk(width)  # [B, W]
    previous = states.expand(-1, width, -1)
    sees = torch.zeros(len(tokens), width, 0, dtype=torch.bool, device=tokens.device)
    own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
    for level in range(1, depth):
        sees = torch.cat([sees, own], dim=-1)  # [B, W, level W] the drafted entries on the path to each
        states = draft_level(tokens, previous, level, sees)
        chances = log_chances(level, states)  # [B, W, V]
        branches.append(tokens)
        conditional.append(chances)
        above = scores[..., None]
        marginal.append((above + chances).logsumexp(1))
        hidden.append(states[:, 0])
        # Keep the best path to each token: two paths to one token would give one candidate.
        best, parents = (above + score(level, chances)).max(1)
        scores, tokens = best.topk(width)
        parents = parents.gather(1, tokens)[..., None]
        previous = states.gather(1, parents.expand(-1, -1, states.shape[-1]))
        sees = sees.gather(1, parents.expand(-1, -1, sees.shape[-1]))
    logits, hidden_states = torch.stack(marginal, dim=1), torch.stack(hidden, dim=1)
    if not branches:
        return Proposal(logits, hidden_states)
    return BeamProposal(
        logits, hidden_states, branches=torch.stack(branches, dim=1), conditional=torch.stack(conditional, dim=1)
    )


def last_of(states: Tensor, counts: Tensor) -> Tensor:
    """Return the states [B, 1, H] of each row's last entry of [B, A, H], of which `counts` [B] are real."""
    return entries_of(states, (counts - 1).clamp(min=0)[:, None])
