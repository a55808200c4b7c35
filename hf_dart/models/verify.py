"""One forward of the target over a whole tree: masks, positions, logits and features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from hf_dart.cache.states import StatefulCache
from hf_dart.cache.target_cache import TargetCache
from hf_dart.models.attention import TreeAttention
from hf_dart.models.devices import device_of, users_default
from hf_dart.models.features import features_request, gather_features
from hf_dart.models.masks import MaskKind, maskless_kinds
from hf_dart.models.positions import position_limit
from hf_dart.models.running_states.mixers import mixers_of
from hf_dart.models.running_states.tree_forward import tree_forwards
from hf_dart.models.stock_steps import cache_name, takes_positions
from hf_dart.trees.config import MAX_NODES
from hf_dart.trees.tree import MAX_DRAFT_LENGTH, DraftTree


class Verifier:
    """Verifier of trees: runs them through a target whose cache holds the committed tokens.

    A step without a draft is run as stock would where that needs no mask of ours: by the user's attention.

    Args:
        target: the causal LM.
        cache: its cache, after prefill.
        kinds: `mask_kinds` of the prefilled stock cache.
        feature_layers: indices of the `hidden_states` that the drafter reads.
        keep_hidden_states: leave the last tree's hidden states of all layers, [..., B, N, ..., H] each, in
            `hidden_states`.
        shift: [B] or [K, B], how far positions that the target is told lie above a row's own (`position_shift`); None
            if nowhere.

    Attributes:
        attention: what it verifies by.
        extra_inputs: arguments of the target besides the usual ones, such as token types.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        cache: TargetCache,
        kinds: list[MaskKind],
        feature_layers: list[int],
        keep_hidden_states: bool = False,
        shift: Tensor | None = None,
    ) -> None:
        self.target = target
        self.cache = cache
        self.kinds = kinds
        self.feature_layers = feature_layers
        self.hidden_states: tuple[Tensor, ...] = ()
        self.shift = shift
        self.extra_inputs: Mapping[str, Any] = {}
        self._keep_hidden_states = keep_hidden_states
        self._takes_positions, self._cache_name = takes_positions(target), cache_name(target)
        self._device = device_of(target.get_input_embeddings())
        self._last_position, self._hard = position_limit(target)
        self.attention = TreeAttention(target)
        # Eager attention adds its mask in any case.
        self._skips_masks = self.attention.own != "eager"
        stateful = isinstance(cache.cache, StatefulCache)
        self.mixers = mixers_of(target) if stateful else []
        self._maskless: dict[str, Any] = dict.fromkeys(maskless_kinds(target, kinds)) if stateful else {}
        self._no_masks = dict.fromkeys(kind.name for kind in kinds) | self._maskless if len(kinds) > 1 else None

    def depth_room(self) -> list[int]:
        """Return how many more positions the target's table holds after each row's root, as far as trees need them."""
        lengths = self.cache.entries.counted
        if self.shift is None and self.cache.longest + MAX_NODES <= self._last_position:
            return [MAX_NODES] * len(lengths)
        positions = lengths
        if self.shift is not None:
            positions = (lengths + self.shift.cpu()).view(-1, len(lengths)).amax(0)
        left = (self._last_position - positions).clamp(min=0)
        # Beyond a soft limit the target runs on as it would without drafts.
        return (left if self._hard else left.masked_fill(positions > self._last_position, MAX_DRAFT_LENGTH)).tolist()

    def __call__(self, tree: DraftTree, limits: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Logits [B, N, V] and features [B, N, F] of every node.

        The nodes' entries stay in the cache until `cache.commit` keeps some and drops the rest.

        Args:
            tree: the tree to verify.
            limits: tokens that each row may emit; what is returned for a row with 0 is not used.
        """
        self.cache.prepare(tree.size)
        masked = tree.size > 1 or not self._runs_plainly()
        return self.run(tree, self.roots(limits).to(tree.tokens.device), masked)

    def roots(self, limits: list[int] | None) -> Tensor:
        """Positions [B] of the roots, on the host; that of a row that has ended may lie beyond the position table."""
        roots = self.cache.entries.counted
        if limits is not None and 0 in limits:
            roots = roots - torch.tensor([limit == 0 for limit in limits]).long()
        return roots

    def _runs_plainly(self) -> bool:
        """Return True if roots attend to what stock's attention would by itself, with `_plain_masks`."""
        if not self._skips_masks:
            return False
        if any(kind.window is not None and self.cache.longest >= kind.window for kind in self.kinds):
            return False
        takes_padding = self.attention.differs and self.attention.own in AttentionMaskInterface()
        return (takes_padding and not self.mixers) or self._sees_all()

    def _sees_all(self) -> bool:
        """Return True if roots attend to every entry of the cache, where stock's attention would run without a mask."""
        return all(bool((self.cache.past_positions(kind.layer) >= 0).all()) for kind in self.kinds)

    def _plain_masks(self) -> Any:
        """Return the mask of stock's step, [B, S + 1], for targets that take padding masks; else no masks."""
        if not self.attention.differs or self.mixers or self._sees_all():
            return self._no_masks
        past = self.cache.past_positions(self.kinds[0].layer)
        return F.pad(past >= 0, (0, 1), value=True).long().to(self._device)

    def run(self, tree: DraftTree, roots: Tensor, masked: bool = True) -> tuple[Tensor, Tensor]:
        """Run a tree for which the cache has room through the target, its roots standing at `roots` [B].

        Args:
            masked: False where the trees are roots alone, which attend to what stock's steps would.
        """
        if tree.tokens.device != self._device:  # prompts may lie on the host while the target does not
            tree, roots = tree.to(self._device), roots.to(self._device)
        with self.takes_trees() if masked else self._takes_states():
            return self.forward(tree, roots, masked)

    @contextmanager
    def takes_trees(self) -> Iterator[None]:
        """Return a context in which this thread's target takes trees, in attention and modules with running states."""
        with self.attention.packed(), self._takes_states():
            yield

    def _takes_states(self) -> AbstractContextManager[None]:
        return tree_forwards(self.mixers) if self.mixers else nullcontext()

    def forward(self, tree: DraftTree, roots: Tensor, masked: bool = True) -> tuple[Tensor, Tensor]:
        """Compute what `run` returns, within `takes_trees`; nothing is read on the host if the cache is fixed."""
        positions = at = roots[:, None] + tree.depths
        if self.shift is not None:
            at = positions + self.shift[..., None].to(positions.device)
        masks: Any = self.masks(tree, positions) if masked else self._plain_masks()
        inputs: dict[str, Any] = dict(self.extra_inputs)
        if self._takes_positions:
            inputs["position_ids"] = at
        keep = self._keep_hidden_states
        inputs.update({"output_hidden_states": True} if keep else features_request(self.feature_layers))
        if isinstance(self.cache.cache, StatefulCache):
            self.cache.cache.states.begin(tree)
        with users_default():
            outputs = self.target(
                input_ids=tree.tokens,
                attention_mask=masks,
                **{self._cache_name: self.cache.cache},
                use_cache=True,
                return_dict=True,
                **inputs,
            )
        if keep:
            self.hidden_states = outputs.hidden_states
        return outputs.logits, gather_features(outputs, self.feature_layers, tree.tokens)

    def masks(self, tree: DraftTree, positions: Tensor) -> Any:
        """Additive masks [B, 1, N, S + N]: a node attends to committed entries and its ancestors, if in the window.

        Float masks are right under eager and SDPA; eager would add a bool one to its scores.
        Models with several kinds of layers take a dict, the others one tensor; None without attention.
        """
        dtype = self.target.dtype
        # Half of the least number: kernels that take exp2 multiply by log2(e), and -inf of a row that has no key in
        # one block of keys would become NaN. It is as good as hidden: exp() of it is 0 next to any score.
        hidden = torch.finfo(dtype).min / 2
        masks: dict[str, Any] = {}
        for kind in self.kinds:
            past = self.cache.past_positions(kind.layer).to(positions.device)
            seen_past = (past >= 0)[:, None].expand(-1, tree.size, -1)
            seen_tree = tree.ancestors
            horizon = kind.horizon(positions)
            if horizon is not None:
                seen_past = seen_past & (past[:, None] > horizon[..., None])
                seen_tree = seen_tree & (positions[:, None] > horizon[..., None])
            seen = torch.cat([seen_past, seen_tree], dim=-1)[:, None]
            masks[kind.name] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, hidden)
        return masks | self._maskless if len(masks) > 1 else next(iter(masks.values()), None)
