"""`MtpDrafter`: the target's own multi-token prediction module drafts (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Newer checkpoints bring a module that was trained with them: one decoder layer over the embedding of a token and the
target's last hidden state in front of it. From the last verified position on, its own output stands in for that state,
and the best tokens of each depth are drafted on from side by side (`drafters.beams`). Stock's `use_mtp` drafts one
token for each module, for one row, and samples another text than stock alone.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.drafters.beams import View, last_of
from hf_dart.drafters.cost import sizes
from hf_dart.drafters.registry import register
from hf_dart.drafters.stock_modules import SHAPE, ModuleCache, StockDrafter
from hf_dart.hub.download import cached_commit
from hf_dart.interop.mtp_module import module_format, read_module
from hf_dart.models.attention import TreeAttention
from hf_dart.models.devices import users_default
from hf_dart.models.features import layer_count
from hf_dart.models.stock_steps import CACHE
from hf_dart.models.verify import MaskKind
from hf_dart.trees.config import TreeConfig


@register("mtp", reads=module_format)
class MtpDrafter(StockDrafter):
    """The multi-token prediction module of a target, as `assistant=`.

    `MtpDrafter.from_target(model)` reads it from the files that the model was loaded from. Where there are several
    modules, one for each token ahead, the first one drafts all tokens.

    Args:
        module: transformers' `MtpModel` of one layer, tied to `target`.
        target: the causal LM that it belongs to; it is attached.
        draft_length: d, passes of the module per draft.
        beam: W, number of different tokens per depth from which drafting continues; 1 drafts a chain.
        tree_config: what `drafter.tree_config` starts as.

    Raises:
        ValueError: the module's layer is of a kind that cannot draft trees, or the target cannot verify them.
    """

    reads_embeddings = True
    feature_layers: Any = None  # the target's last one

    def __init__(
        self,
        module: Any,
        target: PreTrainedModel,
        *,
        draft_length: int = 5,
        beam: int = 4,
        tree_config: TreeConfig | None = None,
    ) -> None:
        super().__init__(1, draft_length, beam, tree_config)
        self.module = module
        (kind,) = getattr(module.config, "layer_types", None) or ["full_attention"]
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"The multi-token prediction module is a layer of {kind}, which cannot draft trees; give a drafter of "
                "another kind."
            )
        self._kind = MaskKind(kind, module.config.sliding_window if kind == "sliding_attention" else None, 0)
        self._rotary = {"layer_type": kind} if module.has_per_layer_rope else {}
        self.feature_layers = [layer_count(target)]
        self._attach(target)

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """Return the module of the checkpoint that `target` was loaded from.

        Args:
            target: the causal LM.
            options: as for the class; ngram, token, and the target's `revision` if several of its commits are cached.

        Raises:
            ValueError: that checkpoint has none, or it cannot be read.
        """
        path = target.config.name_or_path
        if not path:
            raise ValueError(
                "This target was not loaded from files, where its multi-token prediction module would lie; load it "
                "with from_pretrained."
            )
        return cls.from_pretrained(path, target=target, **{"revision": cached_commit(path)} | options)

    @classmethod
    def _load(cls, path: str, target: PreTrainedModel | None, tokenizer: Any, dtype: Any, **where: Any) -> Self:
        """Read the module in a checkpoint of the target's, or a head of speculators, in the target's dtype."""
        if target is None:
            raise ValueError(f"{path} is the checkpoint of a target; pass target=model to draft with its module.")
        shape = {name: where.pop(name) for name in SHAPE if name in where}
        return cls(read_module(path, target, **where), target, **shape)

    def check_fit(self, target: PreTrainedModel) -> None:
        """Refuse other targets than the module's own."""
        ours, theirs = self.module.embed_tokens.weight, target.get_input_embeddings().weight
        if [layer_count(target)] != self.feature_layers or ours.shape != theirs.shape or not torch.equal(ours, theirs):
            raise ValueError("This module belongs to another target; call MtpDrafter.from_target(model) with this one.")

    def weights_read(self) -> list[int]:
        return sizes(self.module.layers) + sizes(self.module.shared_head)

    @property
    def runs_in(self) -> tuple[torch.device, torch.dtype]:
        weight = self.module.layers[0].eh_proj.weight
        return weight.device, weight.dtype

    def read_last(self, state: ModuleCache, features: Tensor, next_tokens: Tensor, counts: Tensor) -> Tensor:
        states = self._run(state, features, next_tokens, View.after(state, next_tokens.shape[1]))
        state.advance(counts)
        return last_of(states, counts)

    def draft_level(self, state: ModuleCache, tokens: Tensor, previous: Tensor, level: int, sees: Tensor) -> Tensor:
        return self._run(state, previous, tokens, View.of_level(state, level, sees))

    def log_chances(self, states: Tensor) -> Tensor:
        return self.module._project_to_logits(states).float().log_softmax(-1)

    def _run(self, state: ModuleCache, features: Tensor, tokens: Tensor, view: View) -> Tensor:
        """States [B, Q, H] of tokens [B, Q], or their embeddings [B, Q, E], after what stands in front, [B, Q, H]."""
        module, (device, _) = self.module, self.runs_in
        view.enter(state, device)
        with TreeAttention(module).for_trees(), users_default():
            embeddings = tokens if tokens.is_floating_point() else module.embed_tokens(tokens.to(device))
            embeddings = embeddings.to(device)
            places = (view.positions + 1).to(device)  # of the tokens
            rotation = None
            if module.rotary_emb is not None:
                rotation = module.rotary_emb(embeddings, position_ids=places, **self._rotary)
            states = module.layers[0](
                embeddings,
                features.to(device=device, dtype=embeddings.dtype),
                position_embeddings=rotation,
                attention_mask=view.masks([self._kind], embeddings.dtype, device),
                position_ids=places,
                **{CACHE: state.cache},
            )
            return module.shared_post_norm(states) if module.use_shared_post_norm else states
