"""`DFlashDrafter`: published DFlash drafters (block diffusion, arXiv 2602.06036) as `assistant=`.

One pass denoises a block: the last known token and masked ones after it, all read through the target's embeddings.
Every layer attends from the block to the block and to the verified positions, whose keys and values it projects
straight from the target's fused features; these positions have no entries of their own, so that taking them in costs
two projections per layer. Entry i of the block predicts the token at its own position.

The layers are Qwen3's, as in both published formats (`interop.dflash`); no code of a checkpoint runs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.drafters.base import Proposal, Score, Verified, pair_scores
from hf_dart.drafters.base_config import DrafterConfig, told_of
from hf_dart.drafters.beams import BeamProposal, draft_beam, last_of
from hf_dart.drafters.dflash.modeling import SELECTORS, DFlashLayer, PathSelector
from hf_dart.drafters.layers import memory, rotation_at
from hf_dart.drafters.published import note_origin
from hf_dart.drafters.registry import register
from hf_dart.drafters.trained import TrainedDrafter
from hf_dart.hub import card_texts
from hf_dart.hub.checkpoint import refused, weight_shapes
from hf_dart.hub.download import weight_files
from hf_dart.interop.decoder_layers import scaled_rotation
from hf_dart.interop.dflash import dflash_format, read_dflash
from hf_dart.interop.weights import read_weights, renamed, vocabulary_maps
from hf_dart.models.features import layer_count
from hf_dart.trees.tree import MAX_DRAFT_LENGTH
from hf_dart.trees.vocabulary import spread

_SHAPE = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps")


class DFlashConfig(DrafterConfig):
    """The config of a [`DFlashDrafter`]: the config.json that it was published with, and what is known of its target.

    Weights are in the same folder under the names of their own format, so that one function reads them.

    Args:
        published: the config.json that the drafter was published with.

    The other fields are those of `hf_dart.drafters.base_config.DrafterConfig`, told by that one and the target.
    """

    model_type = "dart_dflash"

    published: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def needs(self) -> dict[str, int]:
        widths = dict.fromkeys(("hidden size", "embedding width", "LM head width"), self.hidden_size)
        layers = read_dflash(self.published).num_target_layers
        return widths if layers is None else {**widths, "number of layers": layers}

    @property
    def options(self) -> dict[str, Any]:
        """The kind and format of the published drafter, in words."""
        return {"format": dflash_format(self.published)}

    @classmethod
    def of(cls, published: dict[str, Any]) -> Self:
        """Return the config of a published drafter, by its config.json."""
        config = read_dflash(published)
        shape = config.backbone
        return cls(
            published=published,
            draft_length=min(config.block_size - int(not config.anchor_predicts), MAX_DRAFT_LENGTH),
            feature_layers=list(config.feature_layers),
            **{name: getattr(shape, name) for name in _SHAPE},
            embedding_size=shape.hidden_size,
            feature_size=shape.hidden_size,
            vocab_size=config.vocab_size,
            draft_window=shape.max_position_embeddings,  # beyond which it was not trained
            target_num_layers=config.num_target_layers or max(config.feature_layers),
        )


# Rows per token of the draft vocabulary.
_PER_TOKEN = {"lm_head.weight", "selector.markov_w2.weight", "selector.successor_codebook"}


@register("dflash", config=DFlashConfig, card=card_texts.DFLASH, reads=lambda content, _: dflash_format(content))
class DFlashDrafter(TrainedDrafter):
    """A published DFlash drafter (arXiv 2602.06036) or a variant of it: DFlash2, DSpark, Domino, JetSpec.

    `DFlashDrafter.from_pretrained("z-lab/Qwen3-8B-DFlash-b16", target=model)` loads one. It drafts block_size - 1
    tokens in one pass (DSpark: block_size), as a chain or a tree (`tree_config`).

    Attributes:
        shape: what the published config.json says.
        beam: W, number of different tokens per depth after which a Domino head drafts; 1 drafts a chain.
    """

    described_as = "DFlash drafter"
    reads_rows = True
    beam = 4
    layers: Any

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.shape = read_dflash(config.published)
        given, shape = self.shape, self.shape.backbone
        self.fc = nn.Linear(len(given.feature_layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(given, *attending) for attending in given.layers)
        self.norm = Qwen3RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        scored = given.draft_vocab_size
        self.lm_head = None if scored is None else nn.Linear(shape.hidden_size, scored, bias=False)
        self.selector = None
        if given.selector is not None:
            kind, *more = given.selector
            self.selector = SELECTORS[kind](shape.hidden_size, given.vocab_size, scored or given.vocab_size, *more)
        rotation = scaled_rotation(shape.rope_parameters, shape.head_dim, shape.max_position_embeddings)
        self._rope = SimpleNamespace(head_dim=shape.head_dim, rope_theta=config.rope_theta, **rotation)
        self.post_init()

    @classmethod
    def _of_published(
        cls, path: str, content: dict[str, Any], target: PreTrainedModel | None, tokenizer: Any, **where: Any
    ) -> Self:
        config = note_origin(DFlashConfig.of(content), path, **where)
        for name, value in ({} if target is None else told_of(target)).items():
            setattr(config, name, value)
        return cls._of_files(path, config, **where)

    @classmethod
    def _of_files(cls, path: str, config: DFlashConfig, **where: Any) -> Self:
        """Return a drafter of this config; its weights have the names of their own format, ours or not."""
        with refused(f"The config.json in {path}", "fetch it again"), torch.device("meta"):
            drafter = cls(config)  # nothing is allocated by what a config says alone
        shape, files = drafter.shape, weight_files(path, **where)
        stored, own = weight_shapes(files, path), drafter.state_dict()
        names = {name: renamed(name, shape.names) for name in own}
        # Codebooks are plain tensors in z-lab's files, and those of embeddings in what its code writes. Early files of
        # SpecForge have one more name in front.
        others = ((ours, other) for ours, name in names.items() for other in (f"{name}.weight", f"logit_head.{name}"))
        names |= {ours: other for ours, other in others if other in stored}
        weights = read_weights(
            files,
            path,
            names,
            {name: tuple(tensor.shape) for name, tensor in own.items()},
            vocab_size=shape.vocab_size,
            draft_vocab_size=shape.draft_vocab_size,
            per_token=_PER_TOKEN,
            ignored=[name for name in stored if name.startswith(shape.ignored)],
        )
        drafter.draft_vocabulary = weights.pop("draft_vocabulary", None)
        drafter.load_state_dict(weights, assign=True, strict=False)
        return drafter.requires_grad_(False)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write the drafter in our format: its published config.json with what is known of its target, and weights."""
        own = {name: tensor for name, tensor in self.state_dict().items() if name != "draft_vocabulary"}
        named = {renamed(name, self.shape.names): tensor for name, tensor in own.items()}
        if self.draft_vocabulary is not None:
            named |= vocabulary_maps(self.draft_vocabulary, self.config.vocab_size)
        super().save_pretrained(save_directory, state_dict=named, **kwargs)

    def _check_compatible(self, target: PreTrainedModel, tokenizer: Any) -> None:
        super()._check_compatible(target, tokenizer)
        deepest, layers = max(self.shape.feature_layers), layer_count(target)
        if deepest > layers:
            raise ValueError(
                f"This DFlash drafter reads layer {deepest} of its target, and this target has {layers} layers; use "
                "the drafter that was published for it."
            )
        if deepest == layers and self.shape.before_norm:
            raise ValueError(
                f"This DFlash drafter reads the last of {layers} layers of its target before the final norm, which "
                "transformers hands on after it alone; give a drafter that reads earlier layers."
            )

    @property
    def feature_layers(self) -> list[int]:
        return list(self.shape.feature_layers)  # in the order in which they are fused

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotation_at(positions, self._rope, self.dtype)

    # ---- the pass -----------------------------------------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...] to rows of the target's embedding table [..., H], times a factor of the drafter's own."""
        return super().embed(tokens) * self.shape.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to logits [..., V] of the target's LM head, or [..., M] of the drafter's own."""
        logits = super().logits(hidden)
        if self.lm_head is not None:
            return logits
        scale, cap = self.shape.logit_scale, self.shape.logit_cap
        if scale != 1:  # else it would be a copy of all
            logits = logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    # ---- drafting -----------------------------------------------------------------------------------

    @property
    def cache_buffers(self) -> int:
        return 2 * len(self.layers)

    def fused(self, features: Tensor) -> Tensor:
        """Hidden states of the target [..., F] to what layers project keys and values from, [..., H]."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight)))

    def extend(self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor) -> None:
        for part in Verified(features, next_tokens, counts).parts(self.at_once):
            known = self.fused(part.features)
            positions, slots, _ = state.following(known.shape[1])
            rotation = self.rotation(positions)
            for index, layer in enumerate(self.layers):
                memory(state, index, slots, slice(0))(*layer.self_attn.keys_and_values(known, rotation))
            state.advance(part.counts)

    def propose(
        self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None = None
    ) -> Proposal:
        return self.propose_ranked(state, features, next_tokens, counts, depth, lambda _, logits: logits)

    def propose_ranked(
        self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None, score: Score
    ) -> Proposal:
        seen = self.read_ahead(state, Verified(features, next_tokens, counts))
        known = None
        if state.ragged:
            self.extend(state, *seen)
        else:  # a row by itself, which has no padding: one projection for what was verified and the block
            known = self.fused(seen.features)
        depth = depth or self.draft_length
        # If no entry attends to later ones, a shorter draft is the beginning of the longer one.
        first = int(not self.shape.anchor_predicts)
        entries = depth + first if all(layer.causal for layer in self.layers) else self.shape.block_size
        masked = next_tokens.new_full((len(next_tokens), entries - 1), self.shape.mask_token_id)
        roots = last_of(next_tokens, counts)
        x = self.embed(torch.cat([roots, masked], dim=1))
        positions, slots, end = state.following(entries + (0 if known is None else known.shape[1]))
        rotation, slots_at = self.rotation(positions), torch.arange(end, device=positions.device)
        for index, layer in enumerate(self.layers):
            remember = memory(state, index, slots, slice(end))
            sees_all = known is not None and not layer.causal and layer.reach is None
            mask = None if sees_all else layer.sees(positions[:, -entries:], slots_at)
            x = layer(x, rotation, mask, remember, known)
        if known is not None:
            state.advance(seen.counts)
        hidden = self.norm(x)[:, first : depth + first]
        block = Proposal(self.logits(hidden), hidden, self.draft_vocabulary)
        selector = self.selector
        return self._along_paths(block, roots, selector, score) if isinstance(selector, PathSelector) else block

    def _along_paths(self, block: Proposal, roots: Tensor, selector: PathSelector, score: Score) -> Proposal:
        """Draft a beam by what the tokens of each path add to a block's logits; roots are [B, 1]."""

        def beside(states: Tensor, place: int) -> Tensor:
            return block.hidden[:, place, None].expand(-1, states.shape[1], -1)

        def read(tokens: Tensor, states: Tensor, place: int, sees: Tensor | None = None) -> Tensor:
            return selector.read(states, tokens, self.embed(tokens), beside(states, place))

        def log_chances(place: int, states: Tensor) -> Tensor:
            logits = block.logits[:, place, None] + selector.added(states, beside(states, place), place)
            logits = logits.expand(-1, states.shape[1], -1).float()
            return spread(logits, self.draft_vocabulary, self.config.vocab_size).log_softmax(-1)

        states = read(roots.to(block.hidden.device), block.hidden.new_zeros(len(roots), 1, selector.size), 0)
        return draft_beam(states, log_chances, read, self.beam, block.logits.shape[1], score)

    def transitions(self, proposal: Proposal, roots: Tensor, candidates: Tensor, scores: Tensor) -> Tensor | None:
        if isinstance(proposal, BeamProposal):
            return proposal.transitions(candidates, scores)
        selector = self.selector
        if selector is None or isinstance(selector, PathSelector):
            return None

        def added(hidden: Tensor, logits: Tensor, in_front: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
            return selector(hidden, in_front, columns)

        return pair_scores(proposal, roots, candidates, scores, added)
