"""The kinds of attention layers that a target has, and the positions that a query attends to in each."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hf_dart.cache.stock_layers import attention_places, keeps_states, window_of


@dataclass(frozen=True)
class MaskKind:
    """One kind of attention layer.

    Attributes:
        name: its key in the model's mask dict.
        window: how many positions a query attends to, its own included; or the size of chunks.
        layer: one layer of that kind.
    """

    name: str
    window: int | None
    layer: int

    def horizon(self, positions: Tensor) -> Tensor | None:
        """Return the last position to which queries at `positions` no longer attend; None if they attend to all."""
        if self.window is None:
            return None
        if self.name == "chunked_attention":  # chunks of the text, which do not attend to each other
            return positions // self.window * self.window - 1
        return positions - self.window


def layer_windows(target: PreTrainedModel, prefilled: Cache) -> list[int | None]:
    """Return the number of positions that each attention layer of a prefilled cache attends to; None for all.

    It is what stock's own cache says: one that a user made without a config knows of no windows, while the model's
    masks do.
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
        name = "full_attention" if window is None else "sliding_attention"
        if layer_types and not keeps_states(prefilled.layers[index]):  # "hybrid" names no mask
            name = layer_types[index]
        kinds.setdefault(name, MaskKind(name, window, index))
    return list(kinds.values())


def maskless_kinds(target: PreTrainedModel, kinds: list[MaskKind]) -> list[str]:
    """Keys of the model's mask dict that are of no attention layer: of trees, layers with running states need none."""
    return sorted({*_layer_types(target), "linear_attention"} - {kind.name for kind in kinds})


def _layer_types(target: PreTrainedModel) -> list[str]:
    return getattr(target.config.get_text_config(decoder=True), "layer_types", None) or []
