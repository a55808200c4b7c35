"""Modules of transformers that draft: whole language models, or layers of one, over keys and values in slots.

What is verified lies at position p of a row in slot p, whatever the lengths of the other rows; what is drafted comes
after it and is overwritten by the next round, so that nothing moves when a draft is verified.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.cache.stock_layers import SIMPLE_LAYERS
from hf_dart.drafters.base import Verified
from hf_dart.drafters.beams import BeamDrafter
from hf_dart.models.verify import MaskKind, mask_kinds
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.tree import MAX_DRAFT_LENGTH


class ModuleCache(SlotCache):
    """Keys and values of modules of transformers in one call.

    Attributes:
        first: [B] entries that came before those that verified positions bring (`Drafter.read_first`).
        full: the text is longer than the positions that the drafter knows: it drafts no more.
    """

    first: Tensor | int = 0
    full = False

    def cut(self, lengths: Tensor) -> bool:
        """Drop what follows `lengths` [B], besides the `first` entries; see `SlotCache.cut`."""
        return not self.full and super().cut(lengths.cpu() + self.first)


class StockDrafter(BeamDrafter[ModuleCache]):
    """A drafter of transformers' modules, which run once for each of d tokens; arguments as its subclasses have."""

    def __init__(self, draft_length: int, beam: int, tree_config: TreeConfig | None) -> None:
        if not 1 <= draft_length <= MAX_DRAFT_LENGTH or beam < 1:
            raise ValueError(
                f"draft_length is {draft_length} and beam {beam}; give 1 to {MAX_DRAFT_LENGTH}, and 1 or more."
            )
        self.tree_config, self.last_stats = tree_config or TreeConfig(), None
        self.beam, self._draft_length = beam, draft_length

    @property
    def draft_length(self) -> int:
        return self._draft_length

    @property
    @abstractmethod
    def runs_in(self) -> tuple[torch.device, torch.dtype]:
        """Return the device of the modules, and the dtype of their keys and values."""

    def resume(self, state: ModuleCache, pending: list[Verified], lengths: Tensor) -> bool:
        if not state.writable(*self.runs_in):
            return False
        for verified in pending:
            self.extend(state, *verified)
        return state.cut(lengths)


@dataclass(frozen=True)
class View:
    """Slots and positions of one forward's entries, and the mask of what they attend to.

    Attributes:
        positions: [B, Q].
        slots: [B, Q] that they are written to.
        seen: [B, Q, S] bool, which of the first S slots each attends to.
        at: [B, S] the positions of those.
    """

    positions: Tensor
    slots: Tensor
    seen: Tensor
    at: Tensor

    @classmethod
    def after(cls, lengths: Tensor, entries: int) -> View:
        """Return the view of `entries` after the verified ones, `lengths` [B], each attending to all up to itself."""
        positions = lengths[:, None] + torch.arange(entries)
        slots = torch.arange(int(lengths.max()) + entries)
        return cls(positions, positions, slots <= positions[..., None], slots.expand(len(lengths), -1))

    @classmethod
    def of_level(cls, lengths: Tensor, level: int, sees: Tensor) -> View:
        """Return the view of W tokens drafted at depth `level`, which attend to the verified ones and to their path.

        Args:
            lengths: [B] verified entries of each row; the drafted ones of each level follow them, W by W.
            sees: [B, W, level W], as `BeamDrafter.draft_level` has it.
        """
        sees = sees.cpu()
        batch, width, entries = sees.shape
        drafted = torch.arange(entries)
        slots = lengths[:, None] + drafted
        every = torch.arange(int(lengths.max()) + entries).expand(batch, -1)
        seen = (every < lengths[:, None])[:, None].repeat(1, width, 1)
        seen.scatter_(2, slots[:, None].expand(-1, width, -1), sees)
        at = every.scatter(1, slots, lengths[:, None] + drafted // width)
        positions = (lengths + level - 1)[:, None].expand(-1, width)
        return cls(positions, slots[:, -width:], seen, at)

    def masks(self, kinds: Sequence[MaskKind], dtype: torch.dtype, device: torch.device) -> Any:
        """Additive masks [B, 1, Q, S]: one for models with one kind of layers, else a dict of them."""
        masks = {}
        for kind in kinds:
            horizon = kind.horizon(self.positions)
            seen = self.seen if horizon is None else self.seen & (self.at[:, None] > horizon[..., None])
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            mask.masked_fill_(~seen, torch.finfo(dtype).min / 2)  # as in `Verifier.masks`
            masks[kind.name] = mask[:, None].to(device)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def enter(self, cache: SlotCache, device: torch.device) -> None:
        """Let the next forward with `cache` write to these slots."""
        cache.place(self.slots.to(device), self.seen.shape[-1])


def attention_kinds(model: PreTrainedModel) -> tuple[int, list[MaskKind]]:
    """Return the number of layers of a language model, and their kinds.

    Raises:
        ValueError: some keep more than keys and values.
    """
    empty = DynamicCache(config=model.config.get_text_config(decoder=True))
    if not empty.layers or any(type(layer) not in SIMPLE_LAYERS for layer in empty.layers):
        raise ValueError(
            f"{type(model).__name__} keeps more of a text than keys and values, or nothing, and cannot draft; give a "
            "language model of attention layers."
        )
    return len(empty.layers), mask_kinds(model, empty)
