"""One forward of the target over a whole tree: masks, positions, logits and features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import output_capturing

from hf_dart.cache.states import StatefulCache
from hf_dart.cache.stock_layers import attention_places, window_of
from hf_dart.cache.target_cache import TargetCache
from hf_dart.models.attention import TreeAttention, added_mask
from hf_dart.models.devices import device_of, users_default
from hf_dart.models.features import table_of
from hf_dart.models.forwards import standing_in
from hf_dart.models.packed_weights import packed_weights
from hf_dart.models.positions import position_limit
from hf_dart.models.running_states.mixers import mixers_of
from hf_dart.models.stock_steps import cache_name, takes_positions
from hf_dart.trees.config import MAX_NODES
from hf_dart.trees.tree import MAX_DRAFT_LENGTH, DraftTree

# Before this function existed, a list of layers was counted without the embedding output.
_TAKES_INDICES = hasattr(output_capturing, "resolve_hidden_states_indices")


@dataclass(frozen=True)
class MaskKind:
    """One kind of attention layer."""

    name: str  # its key in the model's mask dict
    window: int | None  # positions that a query attends to, its own included; or the size of chunks
    layer: int  # one of that kind

    def mask(self, seen: Tensor, at: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Additive mask [B, 1, Q, S] of queries at `positions` [B, Q] that may attend to entries `seen` [B, Q, S].

        The entries lie at positions `at` [B, S]; of these a layer of this kind reaches some. Float masks are right
        under eager and SDPA; eager would add a bool one to its scores.
        """
        if self.window is not None:
            chunked = self.name == "chunked_attention"  # chunks of the text, which do not attend to each other
            horizon = positions // self.window * self.window - 1 if chunked else positions - self.window
            seen = seen & (at[:, None] > horizon[..., None])
        return added_mask(seen[:, None], dtype)


@dataclass(eq=False, repr=False)
class Verifier:
    """Verifier of trees: runs them through a target whose cache holds the committed tokens.

    A step without a draft is run as stock would where that needs no mask of ours: by the user's attention.
    """

    target: PreTrainedModel
    cache: TargetCache  # of the target, after prefill
    kinds: list[MaskKind]  # `mask_kinds` of the prefilled stock cache
    feature_layers: list[int]  # indices of the `hidden_states` that the drafter reads
    keep_hidden_states: bool = False
    shift: Tensor | None = None  # [B] or [K, B], of positions that the target is told (`position_shift`)
    hidden_states: tuple[Tensor, ...] = field(default=(), init=False)  # of the last tree [..., B, N, ..., H]
    extra_inputs: Mapping[str, Any] = field(default_factory=dict, init=False)  # besides the usual ones

    def __post_init__(self) -> None:
        target, kinds = self.target, self.kinds
        self._takes_positions, self._cache_name = takes_positions(target), cache_name(target)
        self._device = device_of(target.get_input_embeddings())
        self._last_position = position_limit(target)
        self.attention, self._weights = TreeAttention(target), packed_weights(target)
        # Eager attention adds its mask in any case.
        self._skips_masks = self.attention.own != "eager"
        stateful = isinstance(self.cache.cache, StatefulCache)
        self.mixers = mixers_of(target) if stateful else []
        # Keys of the mask dict that are of no attention layer: of trees, layers with running states need no mask.
        other = {*_layer_types(target), "linear_attention"} - {kind.name for kind in kinds}
        self._maskless: dict[str, Any] = dict.fromkeys(sorted(other)) if stateful else {}
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
        # Beyond it the target runs on as it would without drafts.
        return left.masked_fill(positions > self._last_position, MAX_DRAFT_LENGTH).tolist()

    def __call__(self, tree: DraftTree, limits: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Logits [B, N, V] and features [B, N, F] of every node; those of a row that may emit 0 tokens are not used.

        The nodes' entries stay in the cache until `cache.commit` keeps some and drops the rest.
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
        if not self._skips_masks or self.cache.entries.fixed:  # whose empty slots only a mask hides
            return False
        if any(kind.window is not None and self.cache.longest >= kind.window for kind in self.kinds):
            return False
        takes_padding = self.attention.differs and self.attention.own in AttentionMaskInterface()
        return (takes_padding and not self.mixers) or self._sees_all()

    def _sees_all(self) -> bool:
        """Return True if roots attend to every entry of the cache, where stock's attention would run without a mask."""
        return not self.kinds or self.cache.entries.shortest == self.cache.longest

    def _plain_masks(self) -> Any:
        """Return the mask of stock's step, [B, S + 1], for targets that take padding masks; else no masks."""
        if not self.attention.differs or self.mixers or self._sees_all():
            return self._no_masks
        past = self.cache.past_positions(self.kinds[0].layer)
        return F.pad(past >= 0, (0, 1), value=True).long().to(self._device)

    def run(self, tree: DraftTree, roots: Tensor, masked: bool = True) -> tuple[Tensor, Tensor]:
        """Run a tree for which the cache has room through the target, its roots standing at `roots` [B].

        Trees that are not `masked` are roots alone, which attend to what stock's steps would.
        """
        if tree.tokens.device != self._device:  # prompts may lie on the host while the target does not
            tree, roots = tree.to(self._device), roots.to(self._device)
        weights = standing_in(self._weights) if self._weights else nullcontext()
        with weights, self.takes_trees() if masked else self._takes_states():
            return self.forward(tree, roots, masked)

    @contextmanager
    def takes_trees(self) -> Iterator[None]:
        """Return a context in which this thread's target takes trees, in attention and modules with running states."""
        with self.attention.for_trees(), self._takes_states():
            yield

    def _takes_states(self) -> AbstractContextManager[None]:
        return standing_in(self.mixers) if self.mixers else nullcontext()

    def forward(self, tree: DraftTree, roots: Tensor, masked: bool = True) -> tuple[Tensor, Tensor]:
        """Compute what `run` returns, within `takes_trees`; nothing is read on the host if the cache is fixed."""
        positions = at = roots[:, None] + tree.depths
        if self.shift is not None:
            at = positions + self.shift[..., None].to(positions.device)
        masks: Any = self.masks(tree, positions) if masked else self._plain_masks()
        inputs: dict[str, Any] = dict(self.extra_inputs)
        if self._takes_positions:
            inputs["position_ids"] = at
        keep = self.keep_hidden_states
        inputs.update({"output_hidden_states": True} if keep else features_request(self.feature_layers))
        if isinstance(self.cache.cache, StatefulCache):
            self.cache.cache.states.begin(tree)
        with users_default():
            inputs[self._cache_name] = self.cache.cache
            outputs = self.target(
                input_ids=tree.tokens, attention_mask=masks, use_cache=True, return_dict=True, **inputs
            )
        if keep:
            self.hidden_states = outputs.hidden_states
        return outputs.logits, gather_features(outputs, self.feature_layers, tree.tokens)

    def masks(self, tree: DraftTree, positions: Tensor) -> Any:
        """Additive masks [B, 1, N, S + N]: a node attends to committed entries and its ancestors, if in the window.

        Models with several kinds of layers take a dict, the others one tensor; None without attention.
        """
        masks: dict[str, Any] = {}
        for kind in self.kinds:
            past = self.cache.past_positions(kind.layer).to(positions.device)
            seen = torch.cat([(past >= 0)[:, None].expand(-1, tree.size, -1), tree.ancestors], dim=-1)
            masks[kind.name] = kind.mask(seen, torch.cat([past, positions], dim=-1), positions, self.target.dtype)
        return masks | self._maskless if len(masks) > 1 else next(iter(masks.values()), None)


def layer_windows(target: PreTrainedModel, prefilled: Cache) -> list[int | None]:
    """Return the number of positions that each attention layer of a prefilled cache attends to; None for all.

    Stock's own cache says it: one that a user made without a config knows of no windows, while the model's masks do.
    """
    stocks = DynamicCache(config=target.config.get_text_config(decoder=True)).layers
    return [
        window_of(stocks[index] if index < len(stocks) else prefilled.layers[index])
        for index in attention_places(prefilled)
    ]


def mask_kinds(target: PreTrainedModel, prefilled: Cache) -> list[MaskKind]:
    """Return the kinds of attention layer of a prefilled cache, each once."""
    layer_types = _layer_types(target)
    kinds: dict[str, MaskKind] = {}
    for index, window in zip(attention_places(prefilled), layer_windows(target, prefilled), strict=True):
        by_window = "full_attention" if window is None else "sliding_attention"
        name = layer_types[index] if layer_types else by_window
        kinds.setdefault(name, MaskKind(name, window, index))
    return list(kinds.values())


def _layer_types(target: PreTrainedModel) -> list[str]:
    return getattr(target.config.get_text_config(decoder=True), "layer_types", None) or []


def features_request(layers: list[int]) -> dict[str, Any]:
    """Keyword arguments that make a target's forward return the hidden states of `layers`.

    Recent releases of transformers then keep only those; older ones, and older models, keep them all.
    """
    if not layers:
        return {}
    return {"output_hidden_states": list(layers) if _TAKES_INDICES else True}


def row_axis(states: Tensor, rows: int, positions: int) -> int:
    """Return the axis of the rows in hidden states [..., B, N, H], or raise; that of positions comes next.

    Several streams of hidden states come before them (AltUp, arXiv 2301.13310: Gemma 3n).
    """
    axis = states.ndim - 3
    if states.shape[axis : axis + 2] == (rows, positions):
        return axis
    raise ValueError(
        f"This target's hidden states of {rows} x {positions} positions are shaped {list(states.shape)}, of which rows "
        "and positions are not told; call generate without assistant=."
    )


def gather_features(outputs: Any, layers: list[int], like: Tensor) -> Tensor:
    """Return the hidden states of a forward over token ids `like` [B, N] that `features_request` asked for: [B, N, F].

    A model that keeps several streams of hidden states gives their mean.
    """
    if not layers:
        return torch.zeros((*like.shape, 0), device=like.device)
    states = []
    for index in layers:
        found = outputs.hidden_states[index]
        axis = row_axis(found, *like.shape)
        states.append(found.mean(list(range(axis))) if axis else found)
    return torch.cat([state.to(states[-1].device) for state in states], dim=-1)


def merged_embeddings(target: PreTrainedModel, outputs: Any, ids: Tensor) -> Tensor | None:
    """Embeddings [B, N, E] of token ids `ids` [B, N] with those of images and sounds in their places.

    None where the first hidden states, which have to be among those of `outputs`, are no embeddings, not even of text:
    some models scale them, or add others.
    """
    merged, embeddings = gather_features(outputs, [0], ids), target.get_input_embeddings()
    known = embeddings(torch.where(ids < table_of(embeddings).num_embeddings, ids, 0)).to(merged.device)
    same = merged.shape == known.shape and bool((merged == known).all(-1).any())
    return merged if same else None
