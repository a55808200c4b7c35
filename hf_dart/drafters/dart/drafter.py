"""`DartHead`: a draft head; target features and next-token embeddings in, d token distributions out, in one pass.

The architecture is that of DART (arXiv 2601.19278, section 3.1): position i carries the fused features of
the target at i and the embedding of token i + 1; d - 1 mask slots follow the last real position; logits are
shifted, so that the last real position predicts the first draft token and mask slot j the token j + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.drafters import adapters
from hf_dart.drafters.base import Proposal, Verified, pair_scores
from hf_dart.drafters.dart.configuration import DartConfig
from hf_dart.drafters.dart.copied import copied_fields, fill, initialise
from hf_dart.drafters.dart.modeling import BigramSelector, Editor, Edits, Entries
from hf_dart.drafters.draft_vocabulary import unused_token
from hf_dart.drafters.layers import DartLayer, fuse, fusion_norm, memory, take
from hf_dart.drafters.published import load_published
from hf_dart.drafters.registry import register
from hf_dart.drafters.trained import TrainedDrafter
from hf_dart.hub import card_texts
from hf_dart.interop.eagle3 import eagle3_format, is_peagle, read_published
from hf_dart.interop.original_dart import original_format, read_original
from hf_dart.models.devices import device_of, host_by_default
from hf_dart.models.features import vocabulary_size

Part = TypeVar("Part", bound=nn.Module)


@register(
    "dart",
    config=DartConfig,
    trainer="hf_dart.training.trainers.dart:DartTrainer",
    variants={"edit": "hf_dart.training.trainers.edit:EditTrainer"},
    card=card_texts.DART,
    reads=lambda content, _: eagle3_format(content) if is_peagle(content) else original_format(content),
)
class DartHead(TrainedDrafter):
    """A draft head for one target, which lends its token embeddings and its LM head.

    `DartHead.from_target(model)` makes an untrained head, `DartHead.from_pretrained(path, target=model)`
    loads a trained one, also as DART's own code published it (`hf_dart.interop.original_dart`); both check the fit and
    let `model.generate(..., assistant=head)` work.
    """

    config_class = DartConfig
    config: DartConfig
    described_as = "DART head"
    main_input_name = "features"
    _no_split_modules = ["DartLayer"]  # noqa: RUF012

    _base_fingerprint: list[float] | None = None
    """Fingerprint of the weights under its adapters."""

    def __init__(self, config: DartConfig) -> None:
        super().__init__(config)
        self.fusion_norm = fusion_norm(config)
        self.fc = nn.Linear(config.features_width, config.hidden_size, bias=config.fusion_bias)
        self.embedding_norm = nn.RMSNorm(config.embedding_size, config.rms_norm_eps)
        pairs = config.input_form == "pair"
        self.embedding_projection = None if pairs else nn.Linear(config.embedding_size, config.hidden_size, bias=False)
        if pairs:
            self.feature_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        slot_width = config.embedding_size + config.hidden_size if pairs else config.hidden_size
        if config.mask_mode == "peagle":
            slot_width = config.features_width
        # An Embedding, not a Parameter: PEFT's modules_to_save trains and saves modules only.
        self.mask_slot = nn.Embedding(1, slot_width)
        first = [pairs and index == 0 for index in range(config.num_layers)]
        self.layers = nn.ModuleList(DartLayer(config, pairs=one, normed=not one) for one in first)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.make_tables(config)
        self.selector = BigramSelector(config) if config.selector_rank else None
        self.editor = Editor(config) if config.editor else None
        self._filled = False  # with layers of the target's
        if config.copied_layer is not None:
            self._keys_to_ignore_on_save = [f"layers.{name}" for name, _ in self.layers.named_parameters()]
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, BigramSelector):
            first = module.candidate.get_parameter("2.weight") if module.context is None else module.context.weight
            for weight in (first, module.log_scale.weight, module.log_weight.weight):  # then delta is zero
                nn.init.zeros_(weight)
        elif isinstance(module, Editor):
            nn.init.zeros_(module.correction.weight)
        else:
            super()._init_weights(module)

    @classmethod
    @host_by_default
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        tokenizer: Any = None,
        draft_vocabulary: Sequence[int] | Tensor | None = None,
        copy_layer: int | Literal["last"] | None = None,
        seed: int = 0,
        **config: Any,
    ) -> Self:
        """Return a new, untrained head fitted to `target`, and attached to it.

        Args:
            target: the causal LM to draft for.
            tokenizer: its tokenizer, whose hash is then kept in the config and checked at load.
            draft_vocabulary: [M] the only tokens to be drafted (`reduce_vocabulary`); None for all.
            copy_layer: make the head's layers frozen copies of the target's, from this one (0..L - 1) on, or of its
                last ones; LoRA and the new parts are then to be trained (`hf_dart.drafters.dart.copied`).
            seed: of the initial weights; the global generators are not moved.
            config: fields of [`DartConfig`] that shall differ from the paper's head.

        Raises:
            TypeError: a field is unknown, or `target` is no model.
            ValueError: a field is out of range, or the target's layers cannot be copied.
        """
        if tokenizer is not None and config.get("mask_mode") == "peagle" and config.get("mask_token_id") is None:
            config["mask_token_id"] = unused_token(tokenizer, vocabulary_size(target))
        if copy_layer is not None:
            config = copied_fields(target, copy_layer, **config)
        head = super().from_target(target, tokenizer=tokenizer, seed=seed, **config)
        if copy_layer is not None:
            initialise(head, target)
        return head if draft_vocabulary is None else head.reduce_vocabulary(draft_vocabulary)

    @classmethod
    def _load(cls, path: str, target: PreTrainedModel | None, tokenizer: Any, dtype: Any, **where: Any) -> Self:
        """Load a head; `path` may also be that of an adapter, which brings its head with it."""
        base = where.pop("base", None)
        head = adapters.from_folder(cls, path, base, target=target, tokenizer=tokenizer, dtype=dtype, **where)
        if head is None:
            head = super()._load(path, target, tokenizer, dtype, **where)
            head._place = {name: where.get(name) for name in ("revision", "subfolder")}
        return head

    @classmethod
    def _of_published(
        cls, path: str, content: dict[str, Any], target: PreTrainedModel | None, tokenizer: Any, **where: Any
    ) -> Self:
        read = read_published if is_peagle(content) else read_original
        return load_published(cls, path, content, target, tokenizer, read=read, **where)

    def bind(self, target: PreTrainedModel, tokenizer: Any = None) -> Self:
        """Draft for `target` from now on, through its embeddings and LM head.

        Raises:
            ValueError: the head does not fit the target, or a token of its own is none of the target's.
        """
        super().bind(target, tokenizer)
        if self.config.copied_layer is not None and not self._filled:
            fill(self, target)
            self._filled = True
        return self

    def adopt_layers(self) -> Self:
        """Make copied layers the head's own: from now on they are trained and saved like the rest of it."""
        self.config.copied_layer = self.config.fingerprint = None
        self._keys_to_ignore_on_save = []
        self.requires_grad_(True)
        return self

    # ---- the pass -----------------------------------------------------------------------------------

    def inputs(self, features: Tensor, embeddings: Tensor) -> Entries:
        """Return the first layer's entries of positions i, from features [B, T, F] and embeddings of tokens i + 1."""
        return self._entries(fuse(features, self.fusion_norm, self.fc), self.embedding_norm(embeddings))

    def _entries(self, fused: Tensor, token: Tensor) -> Entries:
        """Make entries of fused features [B, T, H] and normed embeddings [B, T, E]."""
        if self.embedding_projection is not None:
            stream = fused + self.embedding_projection(token)
            return Entries(stream, stream)
        known = self.feature_norm(fused)
        residual = known if self.config.norm_before_residual else fused
        return Entries(torch.cat([token, known], dim=-1), residual)

    def slot_inputs(self, batch: int, count: int) -> Entries:
        """Return the entries [B, count, ...] of mask slots, alike; the first H of a learned vector are the residual."""
        learned = self.mask_slot.weight[None]
        if self.config.mask_mode == "peagle":
            # Filled in place: a CUDA graph takes no number from the host.
            where = device_of(self.shared.embeddings)
            assert self.config.mask_token_id is not None
            token = torch.full((1, 1), self.config.mask_token_id, dtype=torch.long, device=where)
            slot = self.inputs(learned, self.embed(token))
        else:
            slot = Entries(learned, learned[..., : self.config.hidden_size])
        return Entries(*(part.expand(batch, count, -1) for part in slot))

    def edit_inputs(self, tokens: Tensor, hidden: Tensor) -> Entries:
        """Return the entries of slots that hold draft tokens [B, M] (`Editor`); where one is -1, its slot stays masked.

        `hidden` [B, M, H] is that of the first pass at these slots.
        """
        assert self.editor is not None
        slots = self.slot_inputs(*tokens.shape)
        token = self.embedding_norm(self.embed(tokens.clamp(min=0)))
        edited = self._entries(self.editor.features(token, hidden), token)
        return edited.where((tokens >= 0).to(edited.x.device), slots)

    def forward(
        self,
        features: Tensor,  # [B, T, F]
        next_embeddings: Tensor,  # [B, T, E]
        positions: Tensor,  # [B, T + M]
        attention_mask: Tensor | None,  # [B, 1, T + M, T + M] bool
        edits: Edits | None = None,
        wanted: Tensor | None = None,  # [B, W] entries
        wanted_mask: Tensor | None = None,  # [B, 1, W, T + M] the rows of `attention_mask` of these
    ) -> Tensor:
        """Run the training pass: T real positions, then M mask slots of many blocks.

        The edit pass runs the slots alone; keys and values of the real positions are those of the first pass. With
        `wanted`, which goes without it, the last layer gives real positions keys and values only, unless they are
        asked for; a head of one layer then needs no `attention_mask`.

        Returns:
            Hidden states [B, T + M or W, H] after the final norm; with `edits` those of both passes, [2, B, T + M, H].
        """
        if any(self.config.windows):
            raise ValueError("This head's layers see a window of the text, and are trained by the code that made them.")
        batch, real = features.shape[:2]
        slots = self.slot_inputs(batch, positions.shape[1] - real)
        x, residual = self.inputs(features, next_embeddings).followed_by(slots)
        rotation = self.rotation(positions)
        known: list[tuple[Tensor, Tensor]] = []  # keys and values of real positions, in the order of their use

        def keep(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            known.append((key[:, :, :real], value[:, :, :real]))
            return key, value

        *before, last = self.layers
        remember = None if edits is None else keep
        for layer in before:
            x = residual = layer(x, residual, rotation, attention_mask, remember)
        mask = attention_mask if wanted is None else wanted_mask
        first = self.final(last(x, residual, rotation, mask, remember, wanted))
        if edits is None:
            return first
        assert self.editor is not None
        x, residual = self.edit_inputs(edits.draft(first), first[:, real:])
        places, left = self.rotation(positions[:, real:]), iter(known)

        def recall(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            known_key, known_value = next(left)
            return torch.cat([known_key, key], dim=2), torch.cat([known_value, value], dim=2)

        for layer in self.layers:
            x = residual = layer(x, residual, places, edits.mask, recall)
        again = self.editor(first[:, real:], self.final(x))
        return torch.stack([first, torch.cat([first[:, :real], again], dim=1)])

    def final(self, x: Tensor) -> Tensor:
        """Apply the final norm to the last layer's output [..., H], for the LM head."""
        return self.norm(self.norm(x)) if self.config.double_norm else self.norm(x)

    # ---- drafting -----------------------------------------------------------------------------------

    fixed_shapes = True

    def extend(self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor) -> None:
        for part in Verified(features, next_tokens, counts).parts(self.at_once):
            entries = self._real_inputs(part.features, part.next_tokens)
            # Only keys and values are needed; computing one entry's output is cheap.
            self._run(state, entries, part.counts.to(self.device), slice(1))
            state.advance(part.counts)

    def propose(
        self, state: SlotCache, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None = None
    ) -> Proposal:
        features, next_tokens, counts = self.read_ahead(state, Verified(features, next_tokens, counts))
        batch, real = next_tokens.shape[:2]
        depth = depth or self.config.draft_length
        # If mask slots do not attend to later ones, a shorter draft is the beginning of the longer one.
        draft = depth if self.config.block_attention == "causal" else self.config.draft_length
        shift = int(self.config.shift_logits)
        slots = draft - shift
        known = counts.to(self.device)
        entries = self._real_inputs(features, next_tokens).followed_by(self.slot_inputs(batch, slots))
        block: Tensor | slice = slice(real - shift, None)
        if state.ragged:
            # A row's mask slots follow its last real entry; later slots are never attended to.
            entry = torch.arange(real + slots, device=self.device)
            padding = (entry >= known[:, None]) & (entry < real)
            entries = self.slot_inputs(1, 1).where(padding, entries)
            block = (known - shift).clamp(min=0)[:, None] + torch.arange(draft, device=self.device)
        hidden = self._run(state, entries, known, block)[:, :depth]
        state.advance(counts)
        return Proposal(self.logits(hidden), hidden, self.draft_vocabulary)

    @property
    def refines(self) -> bool:
        return self.editor is not None

    def refine(self, state: SlotCache, first: Proposal, tokens: Tensor) -> Proposal:
        assert self.editor is not None
        # The slots of the first pass, whose keys and values are overwritten.
        hidden = first.hidden[:, 1:]
        again = self._run(state, self.edit_inputs(tokens[:, :-1], hidden), torch.zeros_like(state.lengths))
        hidden = self.editor(hidden, again)
        logits = torch.cat([first.logits[:, :1], self.logits(hidden)], dim=1)
        return Proposal(logits, torch.cat([first.hidden[:, :1], hidden], dim=1), first.vocabulary)

    def transitions(self, proposal: Proposal, roots: Tensor, candidates: Tensor, scores: Tensor) -> Tensor | None:
        if self.selector is None:
            return None
        selector = self.selector

        def added(hidden: Tensor, logits: Tensor, in_front: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
            return selector.lookup(hidden, logits, self, in_front, tokens)

        return pair_scores(proposal, roots, candidates, scores, added)

    def _real_inputs(self, features: Tensor, next_tokens: Tensor) -> Entries:
        return self.inputs(features.to(device=self.device, dtype=self.dtype), self.embed(next_tokens))

    def _run(self, state: SlotCache, entries: Entries, counts: Tensor, wanted: Tensor | slice | None = None) -> Tensor:
        """Run Q entries per row after the cached ones, of which `counts` [B] are real and the next ones its slots.

        Hidden states are returned of all, or of those that are `wanted`: a slice of them, or their numbers [B, W].
        """
        x, residual = entries
        # A slot may attend to all of its block, also after the last one that is run.
        block = self.config.draft_slots if self.config.block_attention == "bidirectional" else 0
        positions, slots, end = state.following(x.shape[1], block)
        rotation = self.rotation(positions)
        masks = self._masks(state.lengths + counts, positions, end)
        for index, layer in enumerate(self.layers):
            remember = memory(state, index, slots, slice(end))
            asked = wanted if index == len(self.layers) - 1 else None
            mask = take(masks[index % len(masks)], asked)[:, None]
            x = residual = layer(x, residual, rotation, mask, remember, asked)
        return self.final(x)

    def _masks(self, block: Tensor, positions: Tensor, end: int) -> list[Tensor]:
        """Masks [B, Q, end] of entries, one per layer or one for all; those from `block` [B] on are mask slots."""
        keys_at = torch.arange(end, device=positions.device)
        mask = keys_at <= positions[..., None]
        before = keys_at < block[:, None, None]
        if self.config.block_attention == "bidirectional":
            block_end = block[:, None, None] + self.config.draft_slots
            inside = (positions[..., None] >= block[:, None, None]) & (positions[..., None] < block_end)
            mask = mask | (inside & ~before & (keys_at < block_end))
        from_ = positions[..., None]
        return [mask & (~before | (keys_at > from_ - size)) if size else mask for size in self.config.windows or [0]]

    # ---- adapters -----------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write weights and config.json to a folder; of a head with adapters, the active one alone is saved."""
        super().save_pretrained(save_directory, **kwargs)
        if self.adapted and kwargs.get("is_main_process", True):
            adapters.save(self, Path(save_directory))
        self.record_location(str(Path(save_directory).absolute()))  # adapters can name it from now on

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """Put a new adapter on the head, which alone is trained and saved from then on.

        Args:
            adapter_config: such as a `peft.LoraConfig`. Without `target_modules` it is put on all projections of the
                layers and on `fc`; without `modules_to_save` the mask slot is trained with it. Heads of copied layers
                also train all their new parts, and the norms.
            adapter_name: "default" if left out.

        Raises:
            TypeError: `adapter_config` is none of PEFT's.
            ValueError: the head is in no folder as it is now, has such an adapter already, or lacks the modules that
                are named.
        """
        adapters.add(self, adapter_config, adapter_name or "default")

    def load_adapter(self, path: str, adapter_name: str = "default", **where: Any) -> None:
        """Add a trained adapter to those of the head, and make it the active one.

        Args:
            path: a folder or a Hub repository.
            adapter_name: what `set_adapter` will call it.
            where: revision, token, ... as for `from_pretrained`.

        Raises:
            ValueError: there is no adapter, it is damaged, or it was trained on another head; the head is as it was.
        """
        adapters.load(self, path, adapter_name, **where)

    def set_adapter(self, adapter_name: str) -> None:
        """Make this adapter the active one, at any time, between calls and between turns.

        A draft cache that another adapter left stays in use: its keys are nearly right, and nothing but the number of
        accepted drafts depends on them.

        Raises:
            ValueError: the head has no such adapter.
        """
        adapters.activate(self, adapter_name)

    def enable_adapters(self) -> None:
        """Undo `disable_adapters`; transformers forgets modules that are trained as a whole."""
        for module in self.modules():
            if isinstance(module, (ModulesToSaveWrapper, BaseTunerLayer)):
                module.enable_adapters(True)

    def merge_adapter(self) -> Self:
        """Fold the active adapter into the weights and drop the others: a head as if trained whole.

        Raises:
            ValueError: there is none.
        """
        if not self.adapted:
            raise ValueError("This head has no adapter to merge; load one with head.load_adapter(path).")
        adapters.unwrap(self, self.active_adapters()[0])
        self.name_or_path = ""  # it is no longer the head that was stored there
        return self.adopt_layers()

    # ---- other parts --------------------------------------------------------------------------------

    def add_selector(self, rank: int, kind: str = "bigram") -> Self:
        """Give a trained head a bigram selector (`selector`); untrained, it changes no score.

        Args:
            rank: its width.
            kind: "bigram" or "markov".
        """
        self.config.selector_rank, self.config.selector_kind = rank, kind
        self.selector = self._new(BigramSelector)
        return self

    def add_editor(self) -> Self:
        """Let a trained head run again on its own draft (`modeling.Editor`); untrained, it changes nothing.

        Raises:
            ValueError: the head's logits are not shifted.
        """
        if not self.config.shift_logits:
            raise ValueError("Edit passes go with shifted logits; train a head with shift_logits=True for them.")
        self.config.editor = True
        self.editor = self._new(Editor)
        return self

    @host_by_default
    def _new(self, part: Callable[[DartConfig], Part]) -> Part:
        """Return a new part of the head, as its config says; the global generators are not moved."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            made = part(self.config)
            made.apply(self._init_weights)
        return made.to(device=self.device, dtype=self.dtype)
