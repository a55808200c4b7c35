"""`DartHead`: target features and next-token embeddings in, d token distributions out, in one pass.

The architecture is that of DART (arXiv 2601.19278, section 3.1): position i carries the fused features of
the target at i and the embedding of token i + 1; d - 1 mask slots follow the last real position; logits are
shifted, so that the last real position predicts the first draft token and mask slot j the token j + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.configuration import DartConfig, TreeConfig
from hf_dart.fit import check_fit, vocabulary_hash
from hf_dart.hub.download import head_config
from hf_dart.hub.errors import hub_errors
from hf_dart.hub.mixin import PushWithCard
from hf_dart.layers import DartLayer, rotation_at
from hf_dart.proposal import Drafter, Proposal, Verified
from hf_dart.refine import BigramSelector
from hf_dart.slots import SlotSpec, SlotStore

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# What says where on the Hub a file lies.
_HUB_OPTIONS = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "force_download")


@dataclass
class DartState:
    """The draft cache of one call: keys and values of verified positions, position p in slot p.

    Mask slots are written behind them and overwritten by the next round.
    """

    store: SlotStore
    lengths: Tensor  # [B] verified positions taken in, on the head's device
    longest: int  # the largest of them, on the host


class _Shared:
    """The target's modules that the head reads through; copies of the head share them."""

    def __init__(self, target: nn.Module) -> None:
        self.embeddings = target.get_input_embeddings()  # type: ignore[operator]
        self.lm_head = target.get_output_embeddings()  # type: ignore[operator]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


class DartHead(PushWithCard, Drafter[DartState], PreTrainedModel):
    """A draft head for one target, which lends its token embeddings and its LM head.

    `DartHead.from_target(model)` makes an untrained head, `DartHead.from_pretrained(path, target=model)`
    loads a trained one; both check the fit and let `model.generate(..., assistant=head)` work.
    """

    config_class = DartConfig
    config: DartConfig
    base_model_prefix = "dart"
    main_input_name = "features"
    _no_split_modules = ["DartLayer"]  # noqa: RUF012
    _shared: _Shared | None

    def __init__(self, config: DartConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.features_width, config.hidden_size, bias=False)
        self.embedding_norm = nn.RMSNorm(config.embedding_size, config.rms_norm_eps)
        self.feature_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        # An Embedding, not a Parameter: PEFT's modules_to_save trains and saves modules only.
        self.mask_slot = nn.Embedding(1, config.embedding_size + config.hidden_size)
        self.layers = nn.ModuleList(DartLayer(config, index) for index in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.selector = BigramSelector(config) if config.selector_rank else None
        self.tree_config = TreeConfig(**config.tree)
        self.last_stats = None
        self._shared = None
        self.post_init()

    # ---- making, loading, fitting -------------------------------------------------------------------

    @classmethod
    def from_target(cls, target: Any, *, tokenizer: Any = None, seed: int = 0, **config: Any) -> DartHead:
        """A new, untrained head fitted to `target`.

        Args:
            target: the causal LM to draft for.
            tokenizer: its tokenizer, whose hash is then kept in the config and checked at load.
            seed: of the initial weights; the global generators are not moved.
            config: fields of [`DartConfig`] that shall differ from the paper's head.
        """
        if tokenizer is not None:
            config.setdefault("tokenizer_hash", vocabulary_hash(tokenizer))
        fields = DartConfig.for_target(target, **config)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed accelerators too
            head = cls(fields)
        return head._fit(target, tokenizer)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, path: str, *, target: Any = None, tokenizer: Any = None, **kwargs: Any
    ) -> DartHead:
        """Load a head; with `target=` also check that it fits, move it there and attach it.

        Args:
            path: a folder or a Hub repository written by `save_pretrained` / `push_to_hub`.
            target: the model to draft for; without it `bind` has to be called before drafting.
            tokenizer: the target's tokenizer, to be compared with the one the head was trained with. Left
                out, it is looked up beside the target's weights, if they lie on this machine.
            kwargs: as for `PreTrainedModel.from_pretrained` (revision, token, dtype, ...).

        Raises:
            ValueError: the head does not fit the target, or the files are not those of a head; the message says
                what differs.
            OSError: there are no such files, or the Hub does not give them.
        """
        if not Path(path).is_dir() and (Path(path).is_absolute() or str(path).startswith(".")):
            raise ValueError(f"There is no folder {path}; give the folder or the Hub repository of a head.")
        if "config" not in kwargs:
            # transformers would fill in for a missing config.json with the defaults.
            content, commit = head_config(path, **{name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs})
            if content.get("model_type") != DartConfig.model_type:
                raise ValueError(f"{path} holds no config.json of a DART head; give what save_pretrained wrote.")
            if commit is not None:
                kwargs["revision"] = commit  # the weights that go with it, whatever is pushed meanwhile
        where = {name: kwargs.get(name) for name in ("token", "revision")}
        where["otherwise"] = f"{path} holds no weights (model.safetensors); save, push or fetch the head as a whole."
        # A weight of another shape is reported below, in our words.
        options = {"output_loading_info": True, "use_safetensors": True, "ignore_mismatched_sizes": True}
        try:
            with torch.random.fork_rng(devices=[]), hub_errors(path, **where):
                head, info = super().from_pretrained(path, **{**kwargs, **options})
        except SafetensorError as error:
            raise ValueError(f"The weights in {path} are truncated or damaged ({error}); fetch them again.") from error
        mismatched = [name for name, *_ in info["mismatched_keys"]]
        wrong = [*info["missing_keys"], *info["unexpected_keys"], *mismatched]
        if wrong:
            raise ValueError(
                f"The weights in {path} are not those of the head that its config.json describes (first "
                f"difference: {wrong[0]}); both files have to come from one save_pretrained."
            )
        return head.eval() if target is None else head._fit(target, tokenizer, dtype=kwargs.get("dtype"))

    def _fit(self, target: Any, tokenizer: Any, dtype: torch.dtype | None = None) -> DartHead:
        from hf_dart.generation.attach import attach

        self.bind(target, tokenizer)
        lm_head_weight = target.get_output_embeddings().weight
        floating = lm_head_weight.dtype if lm_head_weight.dtype.is_floating_point else target.dtype
        self.to(device=lm_head_weight.device, dtype=dtype or floating)
        attach(target)
        return self.eval()

    def bind(self, target: Any, tokenizer: Any = None) -> DartHead:
        """Read through `target`'s embeddings and LM head from now on.

        Raises:
            ValueError: the head does not fit the target.
        """
        check_fit(self.config, target, tokenizer)
        self._shared = _Shared(target)
        return self

    def check_target(self, target: nn.Module) -> None:
        shared = self._shared_modules
        lent = (target.get_input_embeddings(), target.get_output_embeddings())  # type: ignore[operator]
        if shared.embeddings is not lent[0] or shared.lm_head is not lent[1]:
            # A deep copy or a PEFT wrapper of the same target fits; another model does not.
            check_fit(self.config, target, None)

    @property
    def _shared_modules(self) -> _Shared:
        if self._shared is None:
            raise ValueError(
                "This head has no target: load it with DartHead.from_pretrained(path, target=model), or call "
                "head.bind(model)."
            )
        return self._shared

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, BigramSelector):
            nn.init.zeros_(module.context.weight)
            nn.init.zeros_(module.log_scale.weight)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)

    def add_selector(self, rank: int, seed: int = 0) -> DartHead:
        """Give a trained head a bigram selector (`hf_dart.refine`); untrained, it changes no score.

        Args:
            rank: its width.
            seed: of its initial weights; the global generators are not moved.
        """
        self.config.selector_rank = rank
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            selector = BigramSelector(self.config)
            selector.apply(self._init_weights)
        self.selector = selector.to(device=self.fc.weight.device, dtype=self.dtype)
        return self

    # ---- the pass -----------------------------------------------------------------------------------

    @property
    def draft_length(self) -> int:
        return self.config.draft_length

    @property
    def feature_layers(self) -> list[int]:
        return list(self.config.feature_layers)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...] to the target's embeddings [..., E], on the head's device and in its dtype.

        What is floating already is a prompt given as `inputs_embeds`.
        """
        embeddings = tokens if tokens.is_floating_point() else self._shared_modules.embeddings(tokens)
        return embeddings.to(device=self.fc.weight.device, dtype=self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to logits [..., V] of the target's own LM head."""
        lm_head = self._shared_modules.lm_head
        dtype = lm_head.weight.dtype
        return lm_head(hidden.to(dtype) if dtype.is_floating_point else hidden)

    def inputs(self, features: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """What real positions put into the first layer.

        Args:
            features: [B, T, F] of positions i.
            embeddings: [B, T, E] of the tokens at i + 1.

        Returns:
            The attention input [B, T, E + H] (both halves normed) and the residual [B, T, H] (not normed).
        """
        fused = self.fc(features)
        pair = torch.cat([self.embedding_norm(embeddings), self.feature_norm(fused)], dim=-1)
        return pair, fused

    def slot_inputs(self, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """As `inputs`, of mask slots: one learned vector, the first H of which are the residual."""
        slot = self.mask_slot.weight.expand(*shape, -1)
        return slot, slot[..., : self.config.hidden_size]

    def forward(
        self,
        features: Tensor,  # [B, T, F]
        next_embeddings: Tensor,  # [B, T, E]
        positions: Tensor,  # [B, T + M]
        attention_mask: Tensor | BlockMask,  # [B, 1, T + M, T + M] bool
    ) -> Tensor:
        """The training pass: T real positions, then M mask slots of many blocks (`training.blocks`).

        Returns:
            Hidden states [B, T + M, H] behind the final norm.
        """
        batch, real = features.shape[:2]
        pair, fused = self.inputs(features, next_embeddings)
        slot, slot_residual = self.slot_inputs((batch, positions.shape[1] - real))
        x, residual = torch.cat([pair, slot], dim=1), torch.cat([fused, slot_residual], dim=1)
        rotation = rotation_at(positions, self.config, self.dtype)
        for layer in self.layers:
            x = residual = layer(x, residual, rotation, attention_mask, None)
        return self.norm(x)

    # ---- drafting -----------------------------------------------------------------------------------

    def begin(self, batch_size: int, capacity: int) -> DartState:
        config, device = self.config, self.fc.weight.device
        spec = SlotSpec(config.num_key_value_heads, config.head_dim, self.dtype, device)
        store = SlotStore([spec] * (2 * config.num_layers), batch_size, capacity + config.draft_length)
        return DartState(store, torch.zeros(batch_size, dtype=torch.long, device=device), 0)

    def resume(self, state: DartState, pending: list[Verified], lengths: Tensor) -> bool:
        if not state.store.writable(self.fc.weight.device, self.dtype):
            return False
        for verified in pending:
            self.extend(state, *verified)
        lengths = lengths.to(state.lengths.device)
        if bool((state.lengths < lengths).any()):
            return False
        state.lengths, state.longest = lengths, int(lengths.max())
        return True

    def extend(self, state: DartState, features: Tensor, next_tokens: Tensor, counts: Tensor) -> None:
        self._run(state, *self._real_inputs(features, next_tokens))
        self._advance(state, counts, features.shape[1])

    def propose(
        self, state: DartState, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None = None
    ) -> Proposal:
        batch, real = next_tokens.shape
        depth = depth or self.config.draft_length
        # Where a mask slot sees none behind it, a shorter draft is the beginning of the longer one.
        causal = self.config.block_attention == "causal"
        draft = depth if causal else self.config.draft_length
        device = self.fc.weight.device
        counts = counts.to(device)
        pair, fused = self._real_inputs(features, next_tokens)
        slot, slot_residual = self.slot_inputs((batch, draft - 1))
        x, residual = torch.cat([pair, slot], dim=1), torch.cat([fused, slot_residual], dim=1)
        if batch > 1:
            # A row's mask slots begin right behind its own last real entry; what lies behind its d - 1 slots
            # is never looked at.
            entry = torch.arange(real + draft - 1, device=device)
            padding = ((entry >= counts[:, None]) & (entry < real))[..., None]
            x = torch.where(padding, self.mask_slot.weight, x)
            residual = torch.where(padding, self.mask_slot.weight[:, : residual.shape[-1]], residual)
        hidden = self._run(state, x, residual, None if causal else state.lengths + counts)
        if batch > 1:
            block = (counts - 1).clamp(min=0)[:, None] + torch.arange(draft, device=device)
            hidden = hidden.gather(1, block[..., None].expand(-1, -1, hidden.shape[-1]))
        else:
            hidden = hidden[:, real - 1 :]
        self._advance(state, counts, real)
        hidden = hidden[:, :depth]
        return Proposal(self.logits(hidden), hidden)

    def transitions(self, proposal: Proposal, roots: Tensor, candidates: Tensor, scores: Tensor) -> Tensor | None:
        if self.selector is None:
            return None
        depth, width = candidates.shape[1:]
        device, own = scores.device, proposal.hidden.device
        roots, candidates, scores = roots.to(own), candidates.to(own), scores.to(own)
        tokens = candidates.clamp(min=0)
        in_front = torch.cat([roots[:, None, None].expand(-1, 1, width), tokens[:, :-1]], dim=1)
        embeddings = self._shared_modules.embeddings
        pairs = self.selector.lookup(proposal.hidden[:, :depth], embeddings, in_front, tokens).float()
        # The candidates share out what the draft gave them together, anew behind each predecessor.
        together = scores.logsumexp(-1, keepdim=True)[:, :, None]
        return ((scores[:, :, None] + pairs).log_softmax(-1) + together).to(device)

    def _real_inputs(self, features: Tensor, next_tokens: Tensor) -> tuple[Tensor, Tensor]:
        features = features.to(device=self.fc.weight.device, dtype=self.dtype)
        return self.inputs(features, self.embed(next_tokens))

    def _run(self, state: DartState, x: Tensor, residual: Tensor, block: Tensor | None = None) -> Tensor:
        """Q entries per row behind the cached ones, each seeing the entries up to itself; [B, Q, H].

        Where `block` [B] is given, the d - 1 entries from that position on see each other in both directions.
        """
        batch, queries = x.shape[:2]
        positions = state.lengths[:, None] + torch.arange(queries, device=x.device)
        end = state.longest + queries
        state.store.reserve(end)
        slots: Tensor | int = state.longest if batch == 1 else positions
        keys_at = torch.arange(end, device=x.device)
        mask = (keys_at <= positions[..., None])[:, None]
        if block is not None:
            first, behind = block[:, None], block[:, None] + self.config.draft_length - 1
            queries_inside = (positions >= first) & (positions < behind)
            keys_inside = (keys_at >= first) & (keys_at < behind)
            mask = mask | (queries_inside[:, :, None] & keys_inside[:, None])[:, None]
        rotation = rotation_at(positions, self.config, self.dtype)
        for index, layer in enumerate(self.layers):

            def remember(key: Tensor, value: Tensor, index: int = index) -> tuple[Tensor, Tensor]:
                keys = state.store.write(2 * index, key, slots)
                values = state.store.write(2 * index + 1, value, slots)
                return keys[:, :, :end], values[:, :, :end]

            x = residual = layer(x, residual, rotation, mask, remember)
        return self.norm(x)

    def _advance(self, state: DartState, counts: Tensor, entries: int) -> None:
        state.lengths = state.lengths + counts.to(state.lengths.device)
        # One row: its entries are all real, and the device need not be asked.
        state.longest = state.longest + entries if len(counts) == 1 else int(state.lengths.max())
