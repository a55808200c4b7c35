"""`EagleDrafter`: an autoregressive head drafts token by token (EAGLE-3, arXiv 2503.01840).

It reads what a DART head reads: the embedding of a token next to fused features of the target in front of it, through
one decoder layer. The target's features end at the last verified position; from there on the layer's own output stands
in for them, and d - 1 further passes follow, each over the best tokens of the pass before (EAGLE-2, arXiv 2406.16858,
grows its trees so). Training goes the same way, `hf_dart.training.trainers.eagle`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from hf_dart.cache.slots import SlotSpec
from hf_dart.decoding.proposal import Proposal, Score
from hf_dart.drafters.eagle.configuration import EagleConfig
from hf_dart.drafters.eagle.modeling import EagleModel
from hf_dart.drafters.layers import KeyValueWriter, rotation_at
from hf_dart.drafters.pretrained import PretrainedDrafter
from hf_dart.drafters.registry import register
from hf_dart.drafters.state import SlotState
from hf_dart.hub.kinds import CardTexts, bibtex, describe_features, describe_layers


@dataclass(frozen=True, kw_only=True)
class BeamProposal(Proposal):
    """A draft that branches: after each of W tokens per depth it has a distribution of its own.

    Its `logits` [B, d, V] are log-probabilities, summed over the branches.

    Attributes:
        branches: [B, d - 1, W] the tokens of depths 1 to d - 1 that were drafted on from, different ones per depth.
        conditional: [B, d - 1, W, V] log-probabilities of the next depth after each of them.
    """

    branches: Tensor
    conditional: Tensor

    def where(self, fresh: Tensor, older: Proposal) -> Proposal:
        assert isinstance(older, BeamProposal)
        plain, chosen = super().where(fresh, older), fresh.to(self.logits.device)
        return BeamProposal(
            plain.logits,
            plain.hidden,
            plain.vocabulary,
            branches=torch.where(chosen[:, None, None], self.branches, older.branches),
            conditional=torch.where(chosen[:, None, None, None], self.conditional, older.conditional),
        )

    def within(self, vocab_size: int) -> Proposal:
        plain = super().within(vocab_size)
        return BeamProposal(
            plain.logits,
            plain.hidden,
            plain.vocabulary,
            branches=self.branches,
            conditional=self.conditional[..., :vocab_size],
        )

    def force_token(self, rows: list[bool], token: int) -> None:
        super().force_token(rows, token)
        which = torch.tensor(rows, device=self.logits.device)
        self.branches[which] = token
        self.conditional[which] = self.logits[which, 1:, None].log_softmax(-1)


def _rows(config: EagleConfig) -> dict[str, str]:
    """What a config says, for the table of a card."""
    beam = "" if config.beam == 1 else f", the {config.beam} best of each depth drafted on from"
    return {
        "layers": describe_layers(config, 1),
        "reads": describe_features(config),
        "drafts": f"{config.draft_length} tokens, one pass each{beam}",
    }


_CARD = CardTexts(
    "an EAGLE head",
    "head",
    "eagle",
    "An autoregressive draft head ([EAGLE-3](https://arxiv.org/abs/2503.01840))",
    _rows,
    bibtex(
        "eagle2025",
        "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
        2025,
        "2503.01840",
    ),
)


@register(
    "eagle",
    config=EagleConfig,
    trainer="hf_dart.training.trainers.eagle:EagleTrainer",
    card=_CARD,
)
class EagleDrafter(PretrainedDrafter, EagleModel):
    """An autoregressive draft head, as `assistant=`.

    Attributes:
        beam: W, as in the config.
    """

    config: EagleConfig
    described_as: ClassVar[str] = "EAGLE head"
    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.beam = config.beam

    def passes(self, depth: int) -> int:
        return depth

    # ---- drafting -----------------------------------------------------------------------------------

    @property
    def slot_spec(self) -> SlotSpec:
        return SlotSpec(self.config.num_key_value_heads, self.config.head_dim, self.dtype, self.device)

    def begin(self, batch_size: int, capacity: int) -> SlotState:
        return SlotState.begin(self.slot_spec, 2, batch_size, capacity + self.beam * self.config.draft_length)

    def extend(self, state: SlotState, features: Tensor, next_tokens: Tensor, counts: Tensor) -> None:
        self._read(state, features, next_tokens)
        state.advance(counts)

    def propose(
        self, state: SlotState, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None = None
    ) -> Proposal:
        return self.propose_ranked(state, features, next_tokens, counts, depth, lambda _, logits: logits)

    def propose_ranked(
        self, state: SlotState, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None, score: Score
    ) -> Proposal:
        """Take in verified positions and draft a beam: what is drafted on from are the tokens that `score` best."""
        read = self._read(state, features, next_tokens)
        state.advance(counts)
        ends = (counts - 1).clamp(min=0).to(read.device)[:, None, None].expand(-1, 1, read.shape[-1])
        states = read.gather(1, ends)
        log_chances = self._log_chances(states)  # [B, 1, V]
        marginal, hidden = [log_chances[:, 0]], [states[:, 0]]
        branches, conditional = [], []
        width = min(self.beam, log_chances.shape[-1])
        scores, tokens = score(0, log_chances)[:, 0].topk(width)  # [B, W]
        previous = states.expand(-1, width, -1)
        sees = torch.zeros(len(tokens), width, 0, dtype=torch.bool, device=tokens.device)
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        for level in range(1, depth or self.config.draft_length):
            sees = torch.cat([sees, own], dim=-1)  # [B, W, level W] the drafted entries on the path to each
            states = self._draft(state, self.embed(tokens), previous, level, sees)
            log_chances = self._log_chances(states)  # [B, W, V]
            branches.append(tokens)
            conditional.append(log_chances)
            above = scores[..., None]
            marginal.append((above + log_chances).logsumexp(1))
            hidden.append(states[:, 0])
            # The best path to each token: two to the same token would bring one candidate.
            best, parents = (above + score(level, log_chances)).max(1)
            scores, tokens = best.topk(width)
            parents = parents.gather(1, tokens)[..., None]
            previous = states.gather(1, parents.expand(-1, -1, states.shape[-1]))
            sees = sees.gather(1, parents.expand(-1, -1, sees.shape[-1]))
        logits, hidden_states = torch.stack(marginal, dim=1), torch.stack(hidden, dim=1)
        if not branches:
            return Proposal(logits, hidden_states)
        return BeamProposal(
            logits,
            hidden_states,
            branches=torch.stack(branches, dim=1),
            conditional=torch.stack(conditional, dim=1),
        )

    def transitions(self, proposal: Proposal, roots: Tensor, candidates: Tensor, scores: Tensor) -> Tensor | None:
        """What was drafted after each branch; nothing grows after a token that was not drafted on from."""
        if not isinstance(proposal, BeamProposal):
            return None
        width, device, own = scores.shape[-1], scores.device, proposal.logits.device
        candidates, scores = candidates.to(own), scores.to(own)
        first = scores[:, :1, None].expand(-1, 1, width, -1)
        depth = scores.shape[1] - 1
        columns = candidates[:, 1:].clamp(min=0)  # [B, d - 1, K]
        alone = proposal.logits[:, 1 : depth + 1].gather(-1, columns)
        wide = columns[:, :, None].expand(-1, -1, proposal.branches.shape[-1], -1)
        following = proposal.conditional[:, :depth].gather(-1, wide)  # [B, d - 1, W, K]
        # Scores may hold noise and the target's temperature: what the branch changes is added, and the candidates
        # share out what the draft gave them together.
        together = scores[:, 1:].logsumexp(-1, keepdim=True)[:, :, None]
        shares = (scores[:, 1:, None] + following - alone[:, :, None]).log_softmax(-1) + together
        same = candidates[:, :-1, :, None] == proposal.branches[:, :depth, None]  # [B, d - 1, K, W]
        table = shares.gather(2, same.int().argmax(-1)[..., None].expand(-1, -1, -1, width))
        table = table.masked_fill(~same.any(-1)[..., None], -inf)
        return torch.cat([first, table], dim=1).to(device)

    def _log_chances(self, states: Tensor) -> Tensor:
        return self.logits(self.norm(states)).float().log_softmax(-1)

    def _read(self, state: SlotState, features: Tensor, next_tokens: Tensor) -> Tensor:
        """States [B, A, H] of verified positions, whose keys and values are written after those of `state`."""
        fused = self.fc(features.to(device=self.device, dtype=self.dtype))
        entries = torch.arange(next_tokens.shape[1], device=self.device)
        positions = state.lengths[:, None] + entries
        end = state.longest + len(entries)
        state.store.reserve(end)
        mask = torch.arange(end, device=self.device) <= positions[..., None]
        remember = _writer(state, positions, end)
        rotation = rotation_at(positions, self.config, self.dtype)
        return self.step(self.embed(next_tokens), fused, rotation, mask[:, None], remember)

    def _draft(self, state: SlotState, embeddings: Tensor, previous: Tensor, level: int, sees: Tensor) -> Tensor:
        """One pass over W drafted tokens of depth `level`: states [B, W, H].

        Args:
            embeddings: [B, W, E].
            previous: [B, W, H] the states that drafted them.
            sees: [B, W, level W] which entries of this draft lie on the path to each, itself included.
        """
        width, entries = sees.shape[1:]
        slots = state.lengths[:, None] + torch.arange(entries, device=self.device)
        end = state.longest + entries
        state.store.reserve(end)
        mask = (torch.arange(end, device=self.device) < state.lengths[:, None])[:, None].repeat(1, width, 1)
        mask.scatter_(2, slots[:, None].expand(-1, width, -1), sees)
        positions = (state.lengths + level - 1)[:, None].expand(-1, width)
        rotation = rotation_at(positions, self.config, self.dtype)
        return self.step(embeddings, previous, rotation, mask[:, None], _writer(state, slots[:, -width:], end))


def _writer(state: SlotState, slots: Tensor, end: int) -> KeyValueWriter:
    """Keeps keys and values in `slots` [B, Q] and returns those of slots 0..end - 1."""

    def remember(key: Tensor, value: Tensor, injected: bool = False) -> tuple[Tensor, Tensor]:
        keys, values = state.store.write(0, key, slots), state.store.write(1, value, slots)
        return keys[:, :, :end], values[:, :, :end]

    return remember
