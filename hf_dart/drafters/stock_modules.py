"""Modules of transformers that draft: whole language models, or layers of one, over keys and values in slots.

Drafted entries come after verified ones and are overwritten by the next round: nothing moves when a draft is verified.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.cache.slot_cache import SlotCache
from hf_dart.drafters import hooks
from hf_dart.drafters.beams import BeamDrafter
from hf_dart.drafters.cost import relative_cost
from hf_dart.models.features import lent_modules, table_of
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.tree import MAX_DRAFT_LENGTH

SHAPE = ("draft_length", "beam")  # options of `from_pretrained` that say how such drafters draft
# Of drafters: the targets that they fit. Copies and pickles of a drafter hold none.
_targets: WeakKeyDictionary[StockDrafter, WeakSet[Any]] = WeakKeyDictionary()


class ModuleCache(SlotCache):
    """Keys and values of modules of transformers in one call.

    `first` [B] entries came before verified positions (`Drafter.read_first`); a `full` one is for a text longer than
    the positions that the drafter knows, which drafts no more.
    """

    first: Tensor | int = 0
    full = False

    def cut(self, lengths: Tensor) -> bool:
        """Drop what follows `lengths` [B], besides the `first` entries; see `SlotCache.cut`."""
        return not self.full and super().cut(lengths.cpu() + self.first)


class StockDrafter(BeamDrafter[ModuleCache]):
    """A drafter of transformers' modules with `layers` attention layers, which run once for each of d tokens."""

    def __init__(self, layers: int, draft_length: int, beam: int, tree_config: TreeConfig | None) -> None:
        if not 1 <= draft_length <= MAX_DRAFT_LENGTH or beam < 1:
            raise ValueError(
                f"draft_length is {draft_length} and beam {beam}; give 1 to {MAX_DRAFT_LENGTH}, and 1 or more."
            )
        self.tree_config, self.last_stats = tree_config or TreeConfig(), None
        self.beam, self._layers, self._draft_length = beam, layers, draft_length

    def _attach(self, target: PreTrainedModel) -> None:
        """Let `target`, which the drafter fits, draft with it."""
        self._vocab_size = logits_of(target)
        _targets[self] = WeakSet([target])
        hooks.decoding().attached(target)

    @property
    def draft_length(self) -> int:
        return self._draft_length

    @abstractmethod
    def weights_read(self) -> list[int]:
        """Return the sizes of the weights that a pass reads."""

    @abstractmethod
    def check_fit(self, target: PreTrainedModel) -> None:
        """Raise a `ValueError` if the drafter is for another target."""

    def check_target(self, target: PreTrainedModel) -> None:
        """Refuse other targets than its own; deep copies and PEFT wrappers of it are fine."""
        fitting = _targets.setdefault(self, WeakSet())
        if target not in fitting or logits_of(target) != self._vocab_size:  # which may be resized
            self.check_fit(target)
            fitting.add(target)

    def draft_cost(self, target: PreTrainedModel, depth: int | None = None) -> float:
        return relative_cost(target, depth or self.draft_length, self.weights_read())

    def begin(self, batch_size: int, capacity: int) -> ModuleCache:
        return ModuleCache.of_layers(self._layers, batch_size, capacity + self.beam * self.draft_length)


def logits_of(target: PreTrainedModel) -> int:
    """Return V, the number of logits of a target."""
    embeddings, lm_head = lent_modules(target)
    return int(getattr(lm_head, "out_features", table_of(embeddings).num_embeddings))
