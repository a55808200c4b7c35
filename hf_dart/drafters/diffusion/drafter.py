"""`DiffusionDrafter`: a masked diffusion language model drafts (SpecDiff, arXiv 2408.05636).

A masked block follows the text; reverse steps reveal it (absorbing diffusion: MDLM, arXiv 2406.07524). The transformer
takes no time: what is masked says it. Predictions are shifted (DiffuLLaMA, arXiv 2410.17891): an entry predicts the
token after it, so that the last token of the text predicts the first of the draft, and γ - 1 mask slots the others.

The text attends causally, so that its keys and values are kept over all rounds; a block's slots attend to the text and
to each other in both directions. A reverse step costs γ positions, as in block diffusion (arXiv 2503.09573).
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.drafters.base import Proposal, Verified
from hf_dart.drafters.base_config import DrafterConfig
from hf_dart.drafters.layers import DartLayer, memory, take
from hf_dart.drafters.registry import register
from hf_dart.drafters.trained import TrainedDrafter
from hf_dart.errors import check_fields
from hf_dart.hub import card_texts

UNMASKING = ("confidence", "left_to_right")


class DiffusionConfig(DrafterConfig):
    """The shape of a [`DiffusionDrafter`]; `DiffusionConfig.for_target` reads most of it off a target.

    Args:
        draft_length: γ, how many tokens a draft has at most.
        denoise_steps: T, reverse steps per draft; what `drafter.denoise_steps` starts as.
        unmasking: which tokens a reverse step reveals: those whose best choice is likeliest ("confidence"), or the
            first ("left_to_right"); what `drafter.unmasking` starts as.
        context_window: W, how many tokens back a position attends to; at most the length of the rows trained on.
        num_layers: decoder layers of the drafter's own transformer, whose width is `hidden_size`.
        lm_head_size: width of the target's LM head.

    The other fields are those of `hf_dart.drafters.base_config.DrafterConfig`; without `feature_layers` the drafter
    reads tokens alone.
    """

    model_type = "dart_diffusion"
    changeable = (*DrafterConfig.changeable, "denoise_steps", "unmasking")
    former_fields: ClassVar[dict[str, Any]] = {"share_embeddings": True}

    draft_length: int = 16
    denoise_steps: int = 1
    unmasking: str = "confidence"
    context_window: int = 256
    num_layers: int = 2
    feature_layers: list[int] | tuple[int, ...] = ()
    lm_head_size: int = 256

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        least = dict.fromkeys(("denoise_steps", "num_layers", "lm_head_size"), 1)
        check_fields(self, least=least, choices={"unmasking": UNMASKING})
        if self.context_window <= self.draft_length:
            raise ValueError(
                f"context_window ({self.context_window}) must be larger than draft_length ({self.draft_length}), or "
                "the last slots would see no context."
            )

    @property
    def needs(self) -> dict[str, int]:
        needs = {"embedding width": self.embedding_size, "LM head width": self.lm_head_size}
        if self.feature_layers:
            needs |= {"hidden size": self.feature_size, "number of layers": self.target_num_layers}
        return needs

    @classmethod
    def for_target(cls, target: PreTrainedModel, **overrides: Any) -> Self:
        """Make a config of two layers as wide as those of `target` (a causal LM), without features, plus overrides."""
        shape = DrafterConfig.for_target(target)
        fields = {"feature_layers": (), "hidden_size": shape.feature_size, "lm_head_size": shape.hidden_size}
        return super().for_target(target, **{**fields, **overrides})


MASK = -1  # stands for the mask token where token ids are expected; it is no entry of the vocabulary and has no logit


@register(
    "diffusion",
    config=DiffusionConfig,
    trainer="hf_dart.training.trainers.diffusion:DiffusionTrainer",
    card=card_texts.DIFFUSION,
)
class DiffusionDrafter(TrainedDrafter):
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

    main_input_name = "tokens"
    _no_split_modules = ["DartLayer"]  # noqa: RUF012

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.embedding_norm = nn.RMSNorm(config.embedding_size, config.rms_norm_eps)
        self.embedding_proj = nn.Linear(config.embedding_size, hidden, bias=False)
        same = hidden == config.lm_head_size
        self.output_proj = nn.Identity() if same else nn.Linear(hidden, config.lm_head_size, bias=False)
        if config.feature_layers:
            self.feature_proj = nn.Linear(config.features_width, hidden, bias=False)
            self.feature_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        # An Embedding, not a Parameter: PEFT's modules_to_save trains and saves modules only.
        self.mask_token = nn.Embedding(1, hidden)
        self.layers = nn.ModuleList(DartLayer(config, pairs=False, normed=True) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.denoise_steps = config.denoise_steps
        self.unmasking = config.unmasking
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.output_proj and isinstance(module, nn.Linear):
            # The target's LM head reads normed states, for which the usual initial scale would be far too small.
            nn.init.normal_(module.weight, std=self.config.hidden_size**-0.5)
        else:
            super()._init_weights(module)

    # ---- the network --------------------------------------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...], `MASK` for masked ones, or embeddings, to what goes into the first layer [..., H]."""
        if tokens.is_floating_point():
            return self._project(tokens)
        # Asking whether any is masked would make the host wait for the device.
        embedded = self._project(self.shared.embed(tokens.clamp(min=0).to(self.device)))
        return torch.where((tokens < 0).to(self.device)[..., None], self.mask_token.weight[0], embedded)

    def _project(self, embeddings: Tensor) -> Tensor:
        return self.embedding_proj(self.embedding_norm(embeddings.to(device=self.device, dtype=self.dtype)))

    def embed_text(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Entries [B, A, H] of the text, of tokens [B, A] and the features [B, A, F] in front of each."""
        x = self.embed(tokens)
        if self.config.feature_layers:
            features = features.to(device=self.device, dtype=self.dtype)
            x = x + self.feature_norm(self.feature_proj(features))
        return x

    def read_out(self, x: Tensor) -> Tensor:
        return self.output_proj(self.norm(x))

    def forward(
        self,
        tokens: Tensor,  # [B, T + M]
        features: Tensor,  # [B, T, F]; F is 0 without feature layers
        positions: Tensor,  # [B, T + M]
        attention_mask: Tensor | None,  # [B, 1, T + M, T + M] bool; None for one layer with `wanted`
        wanted: Tensor | None = None,  # [B, W] entries
        wanted_mask: Tensor | None = None,  # [B, 1, W, T + M] the rows of `attention_mask` of these
    ) -> Tensor:
        """Run the training pass: T entries of the text, then M slots of many blocks, `MASK` or known.

        With `wanted` the last layer gives all other entries keys and values only.

        Returns:
            [B, T + M or W, H of the LM head]; `logits` reads distributions off them.
        """
        text = features.shape[1]
        x = torch.cat([self.embed_text(tokens[:, :text], features), self.embed(tokens[:, text:])], dim=1)
        rotation = self.rotation(positions)
        *before, last = self.layers
        for layer in before:
            x = layer(x, x, rotation, attention_mask, None)
        mask = attention_mask if wanted is None else wanted_mask
        return self.read_out(last(x, x, rotation, mask, None, wanted))

    def passes(self, depth: int) -> int:
        return min(self.denoise_steps, max(depth, self.draft_length))  # a shorter draft is cut from the whole block

    # ---- drafting -----------------------------------------------------------------------------------

    def extend(self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor) -> None:
        # Entries attend to a window only: in parts of its length, the cost of a prompt is linear in its length.
        for part in Verified(features, next_tokens, counts).parts(min(self.config.context_window, self.at_once)):
            x = self.embed_text(part.next_tokens, part.features)
            # Only its keys and values are needed; computing one entry's output is cheap.
            self._run(state, x, wanted=counts.new_zeros(len(x), 1).to(x.device))
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
        hidden = self._run(state, x, block - 1, taken, places)
        state.advance(counts)
        logits, hidden = self._denoise(state, self.logits(hidden).to(self.device), hidden)
        return Proposal(logits[:, :depth], hidden[:, :depth])

    def _denoise(self, state: SlotCache, logits: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Run the reverse steps after the first, which has read `logits` and `hidden` states off the masked block.

        The first token's distribution stays: no slot comes before the entry that predicts it.
        """
        batch, depth, _ = logits.shape
        steps = min(self.denoise_steps, depth)
        tokens = torch.full((batch, depth), MASK, device=self.device)
        rows = torch.arange(batch, device=self.device)[:, None]
        masked = torch.arange(depth, device=self.device).expand(batch, depth)  # [B, M], in ascending order
        for step in range(1, steps):
            # Linear schedule: after step s of T, s / T of the block is revealed.
            left = depth - depth * step // steps
            candidates = logits[rows, masked]
            best, likeliest = candidates.max(-1)
            confident = self.unmasking == "confidence"
            order = (best - candidates.logsumexp(-1) if confident else -masked).argsort(-1, descending=True)
            revealed, kept = order.split([masked.shape[1] - left, left], dim=1)
            tokens = tokens.scatter(1, masked.gather(1, revealed), likeliest.gather(1, revealed))
            masked = masked.gather(1, kept.sort(-1).values)
            # All steps write to the same slots.
            read = torch.cat([hidden[:, :1], self._run(state, self.embed(tokens[:, :-1]), depth - 1)], dim=1)
            read = read[rows, masked]
            hidden = hidden.index_put((rows, masked), read)
            logits = logits.index_put((rows, masked), self.logits(read).to(self.device))
        return logits, hidden

    def _run(
        self, state: SlotCache, x: Tensor, block: int = 0, counts: Tensor | None = None, wanted: Tensor | None = None
    ) -> Tensor:
        """Run entries x [B, Q, H] after the cached ones through all layers; the output of all, or of `wanted` [B, W].

        After `counts` [B] of them, or none, come `block` slots that attend to each other in both directions.
        """
        window = self.config.context_window
        positions, slots, end = state.following(x.shape[1])
        first = max(state.shortest + 1 - window, 0)  # no entry attends to what precedes the first key
        keys_at = torch.arange(first, end, device=self.device)
        mask = (keys_at <= positions[..., None]) & (keys_at > positions[..., None] - window)  # [B, Q, S]
        if block:
            start = (state.lengths if counts is None else state.lengths + counts)[:, None]
            queries_inside = (positions >= start) & (positions < start + block)
            keys_inside = (keys_at >= start) & (keys_at < start + block)
            mask = mask | (queries_inside[:, :, None] & keys_inside[:, None])
        rotation = self.rotation(positions)
        for index, layer in enumerate(self.layers):
            remember = memory(state, index, slots, slice(first, end))
            asked = wanted if index == len(self.layers) - 1 else None
            x = layer(x, x, rotation, take(mask, asked)[:, None], remember, asked)
        return self.read_out(x)
