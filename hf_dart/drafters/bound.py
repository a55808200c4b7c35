"""`BoundDrafter`: a drafter made for one target, whose embeddings and LM head it uses once it is bound to it."""

from __future__ import annotations

from typing import Any, Self

import torch
from transformers import PreTrainedModel

from hf_dart.drafters import hooks
from hf_dart.drafters.compatibility import check_compatible
from hf_dart.drafters.state import SlotDrafter
from hf_dart.drafters.target_modules import TargetModules, TargetReader
from hf_dart.models.devices import device_of
from hf_dart.models.features import lm_head_of


class BoundDrafter(SlotDrafter, TargetReader):
    """A drafter that says in its config what its target has to be like (`compatibility.TargetNeeds`)."""

    config: Any

    def bind(self, target: PreTrainedModel, tokenizer: Any = None) -> Self:
        """Draft for `target` from now on, through its embeddings and LM head.

        Args:
            target: a causal LM.
            tokenizer: of the target, compared with that of the target the drafter was made for. Left out, it is looked
                up beside the target's weights, if they lie on this machine.

        Raises:
            ValueError: the drafter was made for another target.
        """
        self._check_compatible(target, tokenizer)
        self._shared = TargetModules(target)
        self._pace_records = None  # drafts cost and bring something else for another target
        return self

    def check_target(self, target: PreTrainedModel) -> None:
        """Refuse a target that the drafter was not made for; its own, deep copies and PEFT wrappers of it are fine.

        Raises:
            ValueError: the drafter has no target, or was made for another one.
        """
        shared = self.shared
        own = shared.embeddings is target.get_input_embeddings() and shared.lm_head is lm_head_of(target)
        if not own and target not in shared.compatible:
            self._check_compatible(target, None)
            shared.compatible.add(target)

    def _check_compatible(self, target: PreTrainedModel, tokenizer: Any) -> None:
        check_compatible(self.config, target, tokenizer)


def attach_to(drafter: Any, target: PreTrainedModel, tokenizer: Any, dtype: torch.dtype | None = None) -> Any:
    """Bind a drafter to `target`, move it to the device and dtype of its LM head (or `dtype`), and attach the target.

    Args:
        drafter: a [`BoundDrafter`] that is an `nn.Module`; it is returned.
        target: a causal LM.
        tokenizer: of the target, as for `bind`.
        dtype: of the drafter's weights.

    Raises:
        ValueError: the drafter was made for another target, or the target cannot verify trees exactly.
    """
    drafter.bind(target, tokenizer)
    lm_head = lm_head_of(target)
    floating = lm_head.weight.dtype if lm_head.weight.dtype.is_floating_point else target.dtype
    drafter.to(device=device_of(lm_head), dtype=dtype or floating)
    hooks.decoding().attached(target)
    return drafter.eval()
