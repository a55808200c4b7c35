"""One forward of the target over a whole tree: masks, positions, logits and features."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from hf_dart.cache.states import StatefulCache
from hf_dart.models.attention import FLEX, TreeAttention, block_mask
from hf_dart.models.devices import device_of, users_default
from hf_dart.models.features import features_request, gather_features, streams_of
from hf_dart.models.masks import MaskKind, maskless_kinds
from hf_dart.models.positions import position_limit
from hf_dart.models.running_states.mixers import mixers_of
from hf_dart.models.running_states.tree_forward import tree_forwards
from hf_dart.models.stock_steps import cache_name, takes_positions
from hf_dart.trees.config import MAX_NODES
from hf_dart.trees.tree import MAX_DRAFT_LENGTH, DraftTree


class Committed(Protocol):
    """What a verifier reads of a cache; see `TreeCache`."""

    cache: Cache
    lengths: Tensor

    def past_positions(self, layer: int, nodes: int) -> Tensor: ...

    def prepare(self, nodes: int) -> None: ...


class Verifier:
    """Runs trees through a target whose cache holds the committed tokens.

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
    """

    def __init__(
        self,
        target: PreTrainedModel,
        cache: Committed,
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
        self._keep_hidden_states, self._streams = keep_hidden_states, streams_of(target)
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
        """How many positions after each row's root the target's position table still holds, as far as trees may go."""
        if self.shift is None and int(self.cache.lengths.max()) + MAX_NODES <= self._last_position:
            return [MAX_NODES] * len(self.cache.lengths)
        return self.room(self.cache.lengths).tolist()

    def room(self, lengths: Tensor) -> Tensor:
        """How many positions [B] the position table still holds after the roots of rows with `lengths` [B]."""
        positions = lengths
        if self.shift is not None:
            positions = (lengths + self.shift.to(lengths.device)).view(-1, len(lengths)).amax(0)
        left = (self._last_position - positions).clamp(min=0)
        # Past a soft end the target runs on as it would without drafts.
        return left if self._hard else left.masked_fill(positions > self._last_position, MAX_DRAFT_LENGTH)

    def __call__(self, tree: DraftTree, limits: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Logits [B, N, V] and features [B, N, F] of every node.

        The nodes' entries stay in the cache until `cache.commit` keeps some and drops the rest.

        Args:
            tree: the tree to verify.
            limits: tokens that each row may emit; what is returned for a row with 0 is not used.
        """
        self.cache.prepare(tree.size)
        roots = self.cache.lengths
        if limits is not None and 0 in limits:
            # The root of a row that has ended may lie beyond the end of the position table.
            roots = roots - torch.tensor([limit == 0 for limit in limits]).long()
        masked = tree.size > 1 or not self._runs_plainly()
        return self.run(tree, roots.to(tree.tokens.device), masked=masked)

    def _runs_plainly(self) -> bool:
        """Do roots see what stock's attention would see by itself, with `_plain_masks`?"""
        if not self._skips_masks:
            return False
        longest = int(self.cache.lengths.max())
        if any(kind.window is not None and longest >= kind.window for kind in self.kinds):
            return False
        takes_padding = self.attention.differs and self.attention.own in AttentionMaskInterface()
        return (takes_padding and not self.mixers) or self._sees_all()

    def _sees_all(self) -> bool:
        """Does a root see every entry that the cache shows, so that stock's attention would run without a mask?"""
        return all(bool((self.cache.past_positions(kind.layer, 1) >= 0).all()) for kind in self.kinds)

    def _plain_masks(self) -> Any:
        """What stock masks a step with: [B, S + 1] for targets that are told of padding so; or nothing."""
        if not self.attention.differs or self.mixers or self._sees_all():
            return self._no_masks
        past = self.cache.past_positions(self.kinds[0].layer, 1)
        return F.pad(past >= 0, (0, 1), value=True).long().to(self._device)

    def run(
        self, tree: DraftTree, roots: Tensor, computed: Tensor | None = None, masked: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Run a tree through the target on fixed shapes: the cache has room for it, and its roots stand at `roots` [B].

        Args:
            computed: [M] of the B N nodes, those to be run, as one row of tokens: logits are [1, M, V] and features
                [1, M, F] then. Cache and attention have to know (`hf_dart.engine.budget`); masks are those of trees.
            masked: False where the trees are roots alone, which see what stock's steps would.
        """
        if tree.tokens.device != self._device:  # prompts may lie on the host while the target does not
            tree, roots = tree.to(self._device), roots.to(self._device)
        positions = at = roots[:, None] + tree.depths
        if self.shift is not None:
            at = positions + self.shift[..., None].to(positions.device)
        tokens = tree.tokens
        if computed is not None:
            tokens, at = tokens.flatten()[computed][None], at.flatten(-2)[..., None, computed]
        masks: Any = self.masks(tree, positions) if masked else self._plain_masks()
        inputs: dict[str, Any] = self.extra_inputs(tree, positions, masks, computed) if masked else {}
        if self._takes_positions:
            inputs["position_ids"] = at
        keep = self._keep_hidden_states
        inputs.update({"output_hidden_states": True} if keep else features_request(self.feature_layers))
        with self._attending() if masked else nullcontext(), self._states(tree), users_default():
            outputs = self.target(
                input_ids=tokens,
                attention_mask=masks,
                **{self._cache_name: self.cache.cache},
                use_cache=True,
                return_dict=True,
                **inputs,
            )
        if keep:
            self.hidden_states = outputs.hidden_states
        return outputs.logits, gather_features(outputs, self.feature_layers, tokens, self._streams)

    def _attending(self) -> AbstractContextManager[None]:
        """Within it, the target attends by what takes a tree's mask."""
        return self.attention.packed()

    def _states(self, tree: DraftTree) -> AbstractContextManager[None]:
        """Within it, modules with running states take a tree."""
        if not isinstance(self.cache.cache, StatefulCache):
            return nullcontext()
        self.cache.cache.states.begin(tree)
        return tree_forwards(self.mixers)

    def extra_inputs(
        self, tree: DraftTree, positions: Tensor, masks: Tensor | dict[str, Tensor], computed: Tensor | None
    ) -> dict[str, Any]:
        """Keyword arguments for the target beside the usual ones."""
        return {}

    def masks(self, tree: DraftTree, positions: Tensor) -> Any:
        """Additive masks [B, 1, N, S + N]: a node sees committed entries and its ancestors, if in the window.

        Float masks are right under eager and SDPA; eager would add a bool one to its scores. FlexAttention takes
        block masks, which say what it may leave out.
        Models with several kinds of layers take a dict, the others one tensor; None without attention.
        """
        dtype = self.target.dtype
        # Half of the least number: kernels that take exp2 multiply by log2(e), and -inf of a row that sees nothing in
        # one block of keys would become NaN. It is as good as hidden: exp() of it is 0 beside any score.
        hidden = torch.finfo(dtype).min / 2
        masks: dict[str, Any] = {}
        for kind in self.kinds:
            past = self.cache.past_positions(kind.layer, tree.size).to(positions.device)
            seen_past = (past >= 0)[:, None].expand(-1, tree.size, -1)
            seen_tree = tree.ancestors
            horizon = kind.horizon(positions)
            if horizon is not None:
                seen_past = seen_past & (past[:, None] > horizon[..., None])
                seen_tree = seen_tree & (positions[:, None] > horizon[..., None])
            seen = torch.cat([seen_past, seen_tree], dim=-1)[:, None]
            if self.attention.name == FLEX:
                masks[kind.name] = block_mask(seen)
            else:
                masks[kind.name] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, hidden)
        return masks | self._maskless if len(masks) > 1 else next(iter(masks.values()), None)
