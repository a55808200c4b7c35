"""`TargetModules`: the embeddings and the LM head that a drafter borrows from its target."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.models.devices import device_of
from hf_dart.models.features import lm_head_of


class TargetModules:
    """The target's modules that a drafter reads through; copies of the drafter share them."""

    def __init__(self, target: PreTrainedModel) -> None:
        self.embeddings = target.get_input_embeddings()
        self.lm_head = lm_head_of(target)
        # Other targets that the drafter was found to be compatible with: deep copies and PEFT wrappers.
        self.compatible: WeakSet[nn.Module] = WeakSet()

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...] to the target's embeddings [..., E], on its device."""
        return self.embeddings(tokens.to(device_of(self.embeddings)))

    def rows(self, vocab_size: int) -> int:
        """Return how many of a drafter's V tokens the target knows; tables may differ in padding rows."""
        return min(vocab_size, self.embeddings.num_embeddings, getattr(self.lm_head, "out_features", vocab_size))

    def __deepcopy__(self, memo: dict[int, Any]) -> TargetModules:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the target out of a pickled drafter: its modules are no part of it, and `bind` lends them again."""
        return _nothing, ()


def _nothing() -> None:
    """Return None in the place of the target, which a pickle leaves out."""
