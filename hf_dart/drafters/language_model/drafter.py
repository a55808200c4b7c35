"""`LanguageModelDrafter`: a small language model drafts for a large one (Leviathan et al., arXiv 2211.17192).

It reads the text with its own cache and drafts token by token, the best tokens of each depth side by side
(`drafters.beams`). Stock's `assistant_model=` drafts chains, for one row, and samples another text than stock alone.
"""

from __future__ import annotations

import inspect
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_dart.cache.stock_layers import SIMPLE_LAYERS, keeps_states
from hf_dart.drafters.beams import View
from hf_dart.drafters.compatibility import unwrapped
from hf_dart.drafters.cost import model_sizes
from hf_dart.drafters.registry import register
from hf_dart.drafters.stock_modules import SHAPE, ModuleCache, StockDrafter, logits_of
from hf_dart.hub.checkpoint import refused, weight_shapes
from hf_dart.hub.download import HUB_OPTIONS, weight_files
from hf_dart.hub.kinds import Names
from hf_dart.interop.eagle3 import eagle1_format
from hf_dart.interop.mtp_module import module_format
from hf_dart.models.attention import TreeAttention
from hf_dart.models.devices import device_of, users_default
from hf_dart.models.features import lm_head_of, vocabulary_size
from hf_dart.models.positions import position_limit
from hf_dart.models.stock_steps import cache_name, takes_positions
from hf_dart.models.tokenizers import tokenizer_beside, vocabulary_hash
from hf_dart.models.trial import check_verification
from hf_dart.models.verify import mask_kinds
from hf_dart.trees.config import TreeConfig

_ITSELF = "The target cannot be its own draft, which would cost what it saves; give a smaller model."
# Fields in the config.json of a drafter, whatever its model_type.
_OF_DRAFTERS = {"backbone_hidden_size", "block_size", "dflash_config", "draft_length", "draft_vocab_size",
                "speculators_model_type"}  # fmt: skip


def _reads(content: dict[str, Any], names: Names) -> str | None:
    known = str(content.get("model_type")) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not known or _OF_DRAFTERS & content.keys() or eagle1_format(content, names):
        return None
    # Of a checkpoint that has a module for it, that drafts.
    return None if module_format(content, names) else "a language model"


@register("language_model", reads=_reads)
class LanguageModelDrafter(StockDrafter):
    """A causal language model with the target's vocabulary, as `assistant=`.

    Args:
        model: a model of transformers that has attention layers alone.
        target: the causal LM to draft for; it is attached.
        tokenizer: the target's, compared with the one stored with the drafting model's weights; by default the one
            stored with the target's weights.
        draft_length: d, passes of the model per draft.
        beam: W, number of different tokens per depth from which drafting continues; 1 drafts a chain.
        tree_config: what `drafter.tree_config` starts as.

    Raises:
        ValueError: the vocabularies differ, or one of the models cannot run trees.
    """

    feature_layers: ClassVar[list[int]] = []

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel,
        *,
        tokenizer: Any = None,
        draft_length: int = 5,
        beam: int = 4,
        tree_config: TreeConfig | None = None,
    ) -> None:
        if unwrapped(model) is unwrapped(target):
            raise ValueError(_ITSELF)
        text = model.config.get_text_config(decoder=True)
        empty = DynamicCache(config=text)
        if not empty.layers or any(type(one) not in SIMPLE_LAYERS or keeps_states(one) for one in empty.layers):
            raise ValueError(
                f"{type(model).__name__} keeps more of a text than keys and values, or nothing, and cannot draft; give "
                "a language model of attention layers."
            )
        super().__init__(len(empty.layers), draft_length, beam, tree_config)
        self._kinds = mask_kinds(model, empty)
        self.model = model.eval()
        check_verification(model)
        known = (text.pad_token_id, text.bos_token_id, text.eos_token_id, 0)
        # Read in place of tokens for which the model has no embeddings.
        self._unknown = next(token for token in known if isinstance(token, int) and token >= 0)
        self._rows = vocabulary_size(model)
        self._last_position = position_limit(model)
        parameters = inspect.signature(type(model).forward).parameters
        self._keeps, self._places = "logits_to_keep" in parameters, takes_positions(model)
        self._cache_name = cache_name(model)
        check_vocabulary(model, target, tokenizer)
        self._attach(target)

    @classmethod
    def _load(cls, path: str, target: PreTrainedModel | None, tokenizer: Any, dtype: Any, **kwargs: Any) -> Self:
        """Load a language model with `AutoModelForCausalLM`, to where the target's LM head is; no code is run."""
        if target is None:
            raise ValueError(f"{path} is a language model, which drafts for another one; pass target=model.")
        shape = {name: kwargs.pop(name) for name in SHAPE if name in kwargs}
        if kwargs.pop("trust_remote_code", False):
            raise ValueError("Code of a repository is not run to draft; leave trust_remote_code= out.")
        if Path(path).resolve() == Path(target.config.name_or_path).resolve() and dtype is None and not kwargs:
            raise ValueError(_ITSELF)  # other revisions of it, or quantised ones, may draft
        where = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
        weight_shapes(weight_files(path, f"{path} holds no weights; fetch the language model again.", **where), path)
        options = {"dtype": dtype or target.dtype, "use_safetensors": True, "output_loading_info": True}
        with refused(f"The language model in {path}", "fetch it again"):
            model, loaded = AutoModelForCausalLM.from_pretrained(path, **options, **kwargs)
            if missing := sorted(loaded["missing_keys"]):
                raise ValueError(f"it lacks {missing[0]}")
        if "device_map" not in kwargs:
            model.to(device_of(lm_head_of(target)))
        return cls(model, target, tokenizer=tokenizer, **shape)

    def check_fit(self, target: PreTrainedModel) -> None:
        """Refuse a target of another vocabulary."""
        check_vocabulary(self.model, target, None)
        if logits_of(target) != self._vocab_size:
            raise ValueError(
                f"This drafter was made for a target with {self._vocab_size} logits and this one has "
                f"{logits_of(target)}; make a LanguageModelDrafter for it."
            )

    def weights_read(self) -> list[int]:
        return model_sizes(self.model)

    def read_first(self, state: ModuleCache, tokens: Tensor, counts: Tensor) -> None:
        self.extend(state, tokens.new_empty(*tokens.shape[:2], 0), tokens, counts)
        state.first = counts.cpu()

    @property
    def runs_in(self) -> tuple[torch.device, torch.dtype]:
        return device_of(self.model.get_input_embeddings()), self.model.dtype

    def read_last(self, state: ModuleCache, features: Tensor, next_tokens: Tensor, counts: Tensor) -> Tensor | None:
        """Take in tokens; logits [B, 1, V] after the last, None where the text is longer than the model's positions."""
        tokens = next_tokens
        if tokens.is_floating_point():  # a prompt given as the target's embeddings
            tokens = tokens.new_full(tokens.shape[:2], self._unknown, dtype=torch.long)
        counts = counts.cpu()
        # The next draft needs positions as well.
        state.full |= int((state.lengths + counts).max()) + self.draft_length > self._last_position
        if state.full:
            return None
        ends = (counts - 1).clamp(min=0)
        wanted, places = ends.unique(return_inverse=True)
        logits = self._run(state, tokens, View.after(state, tokens.shape[1]), wanted)
        state.advance(counts)
        rows = torch.arange(len(counts))
        return logits[rows, places.to(logits.device)][:, None]

    def draft_level(self, state: ModuleCache, tokens: Tensor, previous: Tensor, level: int, sees: Tensor) -> Tensor:
        return self._run(state, tokens, View.of_level(state, level, sees))

    def log_chances(self, states: Tensor) -> Tensor:
        more = self._vocab_size - states.shape[-1]
        # Tables of one vocabulary may differ in padding rows.
        return torch.nn.functional.pad(states.float().log_softmax(-1), (0, more), value=-inf)

    def _run(self, state: ModuleCache, tokens: Tensor, view: View, wanted: Tensor | None = None) -> Tensor:
        """Logits [B, n, V] of the entries `wanted` [n], or all, of tokens [B, Q]."""
        device, _ = self.runs_in
        view.enter(state, device)
        tokens = tokens.to(device)
        inputs: dict[str, Any] = {"input_ids": tokens.where(tokens < self._rows, self._unknown)}
        if self._places:
            # Positions of padding entries may be beyond a table.
            inputs["position_ids"] = view.positions.clamp(max=self._last_position).to(device)
        if wanted is not None and self._keeps:
            inputs["logits_to_keep"] = wanted.to(device)
        with TreeAttention(self.model).for_trees(), users_default():
            logits = self.model(
                attention_mask=view.masks(self._kinds, self.model.dtype, device),
                **{self._cache_name: state.cache},
                use_cache=True,
                return_dict=True,
                **inputs,
            ).logits
        return logits if wanted is None or self._keeps else logits[:, wanted.to(logits.device)]


def check_vocabulary(model: PreTrainedModel, target: PreTrainedModel, tokenizer: Any) -> None:
    """Raise a ValueError if the tokens of two models are not the same, as far as that is known."""
    ours, theirs = tokenizer_beside(model), tokenizer_beside(target) if tokenizer is None else tokenizer
    tables = [vocabulary_size(one) for one in (model, target)]
    rows = min(tables)
    if ours is None or theirs is None:
        same = tables[0] == tables[1]
    else:
        same = vocabulary_hash(ours, rows) == vocabulary_hash(theirs, rows)
    if not same:
        names = [one.config.name_or_path or type(one).__name__ for one in (model, target)]
        raise ValueError(
            f"{names[0]} has other tokens or ids than {names[1]}, and its drafts would mean other text; give a "
            "language model with the target's tokenizer."
        )
