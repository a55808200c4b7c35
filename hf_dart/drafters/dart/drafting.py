"""Drafting with a head's network: its cache of verified positions, and the passes over what is new."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dart.cache.slots import SlotSpec
from hf_dart.decoding.proposer import Proposal
from hf_dart.drafters.dart.modeling import DartModel, Entries
from hf_dart.drafters.layers import rotation_at
from hf_dart.drafters.state import SlotState
from hf_dart.trees.vocabulary import columns_of


class DraftingModel(DartModel):
    """The network as a drafter."""

    @property
    def slot_spec(self) -> SlotSpec:
        return SlotSpec(self.config.num_key_value_heads, self.config.head_dim, self.dtype, self.device)

    def begin(self, batch_size: int, capacity: int) -> SlotState:
        buffers = self._buffers_per_layer * self.config.num_layers
        return SlotState.begin(self.slot_spec, buffers, batch_size, capacity + self.config.draft_length)

    @property
    def _buffers_per_layer(self) -> int:
        return 4 if self.config.inject_features else 2

    def extend(self, state: SlotState, features: Tensor, next_tokens: Tensor, counts: Tensor) -> None:
        self._run(state, self._real_inputs(features, next_tokens), counts.to(self.device))
        state.advance(counts)

    def propose(
        self, state: SlotState, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None = None
    ) -> Proposal:
        batch, real = next_tokens.shape[:2]
        depth = depth or self.config.draft_length
        # Where a mask slot sees none behind it, a shorter draft is the beginning of the longer one.
        draft = depth if self.config.block_attention == "causal" else self.config.draft_length
        shift = int(self.config.shift_logits)
        slots = draft - shift
        known = counts.to(self.device)
        entries = self._real_inputs(features, next_tokens).then(self.slot_inputs(batch, slots))
        if state.ragged:
            # A row's mask slots begin right behind its own last real entry; what lies behind them is never looked at.
            entry = torch.arange(real + slots, device=self.device)
            padding = ((entry >= known[:, None]) & (entry < real))[..., None]
            slot = self.slot_inputs(1, 1)
            x, residual = torch.where(padding, slot.x, entries.x), torch.where(padding, slot.residual, entries.residual)
            entries = Entries(x, residual, entries.context)
        hidden = self._run(state, entries, known)
        if state.ragged:
            block = (known - shift).clamp(min=0)[:, None] + torch.arange(draft, device=self.device)
            hidden = hidden.gather(1, block[..., None].expand(-1, -1, hidden.shape[-1]))
        else:
            hidden = hidden[:, real - shift :]
        state.advance(counts)
        hidden = hidden[:, :depth]
        return Proposal(self.draft_logits(hidden), hidden, self.draft_vocabulary)

    @property
    def refines(self) -> bool:
        return self.editor is not None

    def refine(self, state: SlotState, first: Proposal, tokens: Tensor) -> Proposal:
        if self.editor is None:
            return super().refine(state, first, tokens)
        # The slots of the first pass, whose keys and values are overwritten.
        hidden = first.hidden[:, 1:]
        again = self._run(state, self.edit_inputs(tokens[:, :-1], hidden), torch.zeros_like(state.lengths))
        hidden = self.editor(hidden, again)
        logits = torch.cat([first.logits[:, :1], self.draft_logits(hidden)], dim=1)
        return Proposal(logits, torch.cat([first.hidden[:, :1], hidden], dim=1), first.vocabulary)

    def transitions(self, proposal: Proposal, roots: Tensor, candidates: Tensor, scores: Tensor) -> Tensor | None:
        if self.selector is None:
            return None
        depth, width = candidates.shape[1:]
        device, own = scores.device, proposal.hidden.device
        roots, candidates, scores = roots.to(own), candidates.to(own), scores.to(own)
        tokens = candidates.clamp(min=0)
        in_front = torch.cat([roots[:, None, None].expand(-1, 1, width), tokens[:, :-1]], dim=1)
        columns = tokens if proposal.vocabulary is None else columns_of(tokens, proposal.vocabulary, 0)
        logits = proposal.logits[:, :depth].gather(-1, columns)
        delta = self.selector.lookup(
            proposal.hidden[:, :depth], logits, self.shared.embeddings, in_front, tokens
        ).float()
        # The candidates share out what the draft gave them together, anew behind each predecessor.
        together = scores.logsumexp(-1, keepdim=True)[:, :, None]
        return ((scores[:, :, None] + delta).log_softmax(-1) + together).to(device)

    def _real_inputs(self, features: Tensor, next_tokens: Tensor) -> Entries:
        return self.inputs(features.to(device=self.device, dtype=self.dtype), self.embed(next_tokens))

    def _run(self, state: SlotState, entries: Entries, counts: Tensor) -> Tensor:
        """Q entries per row behind the cached ones, each seeing the entries up to itself; [B, Q, H].

        The first `counts` [B] entries of a row are real, the next ones the slots of its block.
        """
        x, residual, context = entries
        queries = x.shape[1]
        positions = state.lengths[:, None] + torch.arange(queries, device=x.device)
        # A slot may see all of its block, also behind the last one that is run.
        block = self.config.draft_slots if self.config.block_attention == "bidirectional" else 0
        end = state.reach(max(queries, block))
        rotation = rotation_at(positions, self.config, self.dtype, self.config.rope_frequencies)
        mask = self._mask(state.lengths + counts, positions, end)
        for index, layer in enumerate(self.layers):

            def remember(
                key: Tensor, value: Tensor, injected: bool = False, index: int = index
            ) -> tuple[Tensor, Tensor]:
                first = index * self._buffers_per_layer + 2 * injected
                keys, values = state.write(first, key, positions), state.write(first + 1, value, positions)
                return keys[:, :, :end], values[:, :, :end]

            x = residual = layer(x, residual, rotation, mask, remember, context)
        return self.final(x)

    def _mask(self, block: Tensor, positions: Tensor, end: int) -> Tensor:
        """What the entries at `positions` [B, Q] see of slots 0..end - 1: [B, 1, Q, end], or twice that.

        Args:
            block: [B] position of the first mask slot. In bidirectional heads, the slots from there on see each
                other in both directions. Injected features, the second half, lie in front of it.
        """
        keys_at = torch.arange(end, device=positions.device)
        seen = mask = keys_at <= positions[..., None]
        before = keys_at < block[:, None, None]
        if self.config.block_attention == "bidirectional":
            behind = block[:, None, None] + self.config.draft_slots
            inside = (positions[..., None] >= block[:, None, None]) & (positions[..., None] < behind)
            mask = mask | (inside & ~before & (keys_at < behind))
        return (torch.cat([mask, seen & before], dim=-1) if self.config.inject_features else mask)[:, None]
