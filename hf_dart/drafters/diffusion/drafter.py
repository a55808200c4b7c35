"""`DiffusionDrafter`: a masked diffusion language model drafts (SpecDiff, arXiv 2408.05636).

A masked block follows the text; reverse steps reveal it, from all masked to all known (absorbing diffusion:
MDLM, arXiv 2406.07524). The transformer takes no time: what is masked says it. Predictions are shifted, as in diffusion
models made from language models (DiffuLLaMA, arXiv 2410.17891): an entry predicts the token after it, so that the last
token of the text predicts the first of the draft, and γ - 1 mask slots the others.

The text itself attends causally, a block's slots attend to the text and each other in both directions. A model that
reads the text bidirectionally, too, would have to read all of it again for every draft, since each token changes the
states of all others. So the keys and values of the text are computed once and kept over all rounds, and a reverse step
costs γ positions, as in block diffusion (arXiv 2503.09573).
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.drafters.base import Proposal, Verified
from hf_dart.drafters.diffusion.configuration import DiffusionConfig
from hf_dart.drafters.diffusion.modeling import MASK, DiffusionModel
from hf_dart.drafters.layers import memory, rotation_at, take
from hf_dart.drafters.registry import register
from hf_dart.hub import card_texts


class View(NamedTuple):
    """Slots and positions of new entries, and the mask of what they attend to in the cache.

    Attributes:
        rotation: of their positions.
        mask: [B, Q, S] bool, the keys that each of them attends to.
        slots: [B, Q] of the cache that they are written to, or the first of consecutive ones.
        keys: the slots that the mask is about.
    """

    rotation: tuple[Tensor, Tensor]
    mask: Tensor
    slots: Tensor | int
    keys: slice


@register(
    "diffusion",
    config=DiffusionConfig,
    trainer="hf_dart.training.trainers.diffusion:DiffusionTrainer",
    card=card_texts.DIFFUSION,
)
class DiffusionDrafter(DiffusionModel):
    """A masked diffusion LM with the target's tokenizer (SpecDiff, arXiv 2408.05636), as `assistant=`.

    `DiffusionDrafter.from_target(model)` makes an untrained one, `DiffusionDrafter.from_pretrained(path, target=model)`
    loads a trained one. It drafts γ tokens (`draft_length`).

    Entry p of its text is the token at position p + 1, and the target's features at p where the config names layers:
    what is known of a token before the target reads it. γ - 1 slots follow, for all tokens of the draft but the last.

    Attributes:
        denoise_steps: T, reverse steps per draft; 1 reads all distributions off the masked block. Steps beyond
            the number of draft tokens have no effect.
        unmasking: "confidence" or "left_to_right", as in the config.
    """

    config: DiffusionConfig
    described_as: ClassVar[str] = "diffusion drafter"

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__(config)
        self.denoise_steps = config.denoise_steps
        self.unmasking = config.unmasking

    def passes(self, depth: int) -> int:
        return min(self.denoise_steps, max(depth, self.draft_length))  # a shorter draft is cut from the whole block

    # ---- drafting -----------------------------------------------------------------------------------

    @property
    def reads_embeddings(self) -> bool:
        return self.config.share_embeddings

    def extend(self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor) -> None:
        # Entries attend to a window only: in parts of its length, the cost of a prompt is linear in its length.
        for part in Verified(features, next_tokens, counts).parts(self.config.context_window):
            x = self.embed_text(part.next_tokens, part.features)
            # Only its keys and values are needed; computing one entry's output is cheap.
            self._run(state, x, self._view(state, x.shape[1]), counts.new_zeros(len(x), 1).to(x.device))
            state.advance(part.counts)

    def propose(
        self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None = None
    ) -> Proposal:
        """Take in verified positions and draft by reverse steps.

        A slot's logits are those of the step that revealed it, or of the last step.
        """
        features, next_tokens, counts = self.read_ahead(state, Verified(features, next_tokens, counts))
        batch, known = next_tokens.shape
        # Slots attend to each other in both directions: a shorter block is not the beginning of the trained one.
        block = max(depth or 0, self.draft_length)
        taken = counts.to(self.device)
        slots = self.embed(next_tokens.new_full((batch, block - 1), MASK, dtype=torch.long))
        x = torch.cat([self.embed_text(next_tokens, features), slots], dim=1)
        if batch > 1:
            # A row's slots follow its last real entry; later slots are never attended to.
            entry = torch.arange(known + block - 1, device=self.device)
            padding = (entry >= taken[:, None]) & (entry < known)
            x = torch.where(padding[..., None], self.mask_token.weight, x)
        places = (taken - 1).clamp(min=0)[:, None] + torch.arange(block, device=self.device)
        hidden = self._run(state, x, self._view(state, known + block - 1, block - 1, taken), places)
        state.advance(counts)
        draft = self._denoise(state, Proposal(self.logits(hidden), hidden))
        return Proposal(draft.logits[:, :depth], draft.hidden[:, :depth])

    def _denoise(self, state: SlotCache, proposal: Proposal) -> Proposal:
        """Run the reverse steps after the first, whose reading of the masked block is `proposal`.

        The first token's distribution stays: no slot comes before the entry that predicts it.
        """
        logits, hidden = proposal.logits, proposal.hidden
        batch, depth, _ = logits.shape
        steps = min(self.denoise_steps, depth)
        tokens = torch.full((batch, depth), MASK, device=self.device)
        masked = torch.arange(depth, device=self.device).expand(batch, depth)  # [B, M], in ascending order
        # All steps write to the same slots.
        view = self._view(state, depth - 1, depth - 1) if steps > 1 else None
        for step in range(1, steps):
            # Linear schedule: after step s of T, s / T of the block is revealed.
            left = depth - depth * step // steps
            candidates = logits.gather(1, _along(masked, logits))
            best, likeliest = candidates.max(-1)
            confident = self.unmasking == "confidence"
            order = (best - candidates.logsumexp(-1) if confident else -masked).argsort(-1, descending=True)
            revealed, kept = order.split([masked.shape[1] - left, left], dim=1)
            tokens = tokens.scatter(1, masked.gather(1, revealed), likeliest.to(self.device).gather(1, revealed))
            masked = masked.gather(1, kept.sort(-1).values)
            assert view is not None
            read = torch.cat([hidden[:, :1], self._run(state, self.embed(tokens[:, :-1]), view)], dim=1)
            read = read.gather(1, _along(masked, read))
            hidden = hidden.scatter(1, _along(masked, read), read)
            fresh = self.logits(read)
            logits = logits.scatter(1, _along(masked, fresh), fresh)
        return Proposal(logits, hidden)

    def _view(self, state: SlotCache, queries: int, block: int = 0, counts: Tensor | None = None) -> View:
        """Return the view of Q entries per row after the cached ones, each attending to the window up to itself.

        Args:
            block: slots that attend to each other in both directions.
            counts: [B] entries in front of those slots; None if they are the first of the Q.
        """
        window, device = self.config.context_window, self.device
        positions = state.lengths[:, None] + torch.arange(queries, device=device)
        # No entry attends to what precedes the first key.
        first, end = max(state.shortest + 1 - window, 0), state.longest + queries
        state.store.reserve(end)
        keys_at = torch.arange(first, end, device=device)
        mask = (keys_at <= positions[..., None]) & (keys_at > positions[..., None] - window)
        if block:
            start = (state.lengths if counts is None else state.lengths + counts)[:, None]
            queries_inside = (positions >= start) & (positions < start + block)
            keys_inside = (keys_at >= start) & (keys_at < start + block)
            mask = mask | (queries_inside[:, :, None] & keys_inside[:, None])
        slots = state.longest if len(positions) == 1 else positions
        return View(rotation_at(positions, self.config, self.dtype), mask, slots, slice(first, end))

    def _run(self, state: SlotCache, x: Tensor, view: View, wanted: Tensor | None = None) -> Tensor:
        """Entries x [B, Q, H] through all layers, their keys and values into the cache; as `forward`.

        Args:
            wanted: [B, W] entries whose output is wanted; None is all.
        """
        for index, layer in enumerate(self.layers):
            remember = memory(state, index, view.slots, view.keys)
            asked = wanted if index == len(self.layers) - 1 else None
            x = layer(x, x, view.rotation, take(view.mask, asked)[:, None], remember, None, asked)
        return self.read_out(x)


def _along(places: Tensor, states: Tensor) -> Tensor:
    """Return the indices `places` [B, M] as `gather` takes them along dim 1 of `states` [B, N, W]: [B, M, W]."""
    return places.to(states.device)[..., None].expand(-1, -1, states.shape[-1])
