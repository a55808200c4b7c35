"""`DraftNetwork`: a network that reads tokens through a target's embeddings and scores them with its LM head."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakSet

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.target.devices import device_of, where_it_runs


class TargetModules:
    """The target's modules that a drafter reads through; copies of the drafter share them."""

    def __init__(self, target: nn.Module) -> None:
        self.embeddings = target.get_input_embeddings()  # type: ignore[operator]
        self.lm_head = target.get_output_embeddings()  # type: ignore[operator]
        # Other targets that were seen to fit: deep copies and PEFT wrappers.
        self.fitting: WeakSet[nn.Module] = WeakSet()

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...] to the target's embeddings [..., E], on its device."""
        return self.embeddings(tokens.to(device_of(self.embeddings)))

    def rows(self, vocab_size: int) -> int:
        """How many of a drafter's V tokens the target knows; tables may differ in padding rows."""
        return min(vocab_size, self.embeddings.num_embeddings, getattr(self.lm_head, "out_features", vocab_size))

    def __deepcopy__(self, memo: dict[int, Any]) -> TargetModules:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, a drafter has no target: its modules are no part of it, and `bind` lends them anew."""
        return _nothing, ()


def _nothing() -> None:
    """What stands for the target in a pickle."""


class DraftNetwork(PreTrainedModel):
    """The network of a drafter, without the target's modules: `bind` lends it those of one target.

    A subclass makes its modules in `__init__`, which ends with `self.post_init()`, and has the training pass as
    `forward`.
    """

    described_as: ClassVar[str]
    """What messages call it."""
    config: Any
    draft_vocabulary: Tensor | None
    """[M] ids of the tokens that its logits are about, ascending; None for all."""
    _shared: TargetModules | None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._shared = None
        self.register_buffer("draft_vocabulary", None)

    @property
    def shared(self) -> TargetModules:
        """The target's modules.

        Raises:
            ValueError: the drafter has no target.
        """
        if self._shared is None:
            name = type(self).__name__
            raise ValueError(
                f"This {self.described_as} has no target: load it with {name}.from_pretrained(path, target=model), or "
                "call its bind(model)."
            )
        return self._shared

    @property
    def lm_head_weights(self) -> int:
        """How many weights of the target's LM head score a draft."""
        weights = int(self.shared.lm_head.weight.numel())
        if self.draft_vocabulary is None:
            return weights
        return weights * len(self.draft_vocabulary) // self.shared.embeddings.num_embeddings

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...] to the target's embeddings [..., E], on the network's device and in its dtype.

        What is floating already is a prompt given as `inputs_embeds`.
        """
        embeddings = tokens if tokens.is_floating_point() else self.shared.embed(tokens)
        return embeddings.to(device=self.device, dtype=self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to logits [..., V] of the target's LM head."""
        lm_head = self.shared.lm_head
        dtype = lm_head.weight.dtype
        return where_it_runs(lm_head, hidden.to(dtype) if dtype.is_floating_point else hidden)

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """None: tokens are embedded by the target. FSDP asks."""
