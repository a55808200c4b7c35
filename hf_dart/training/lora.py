"""Options of training for LoRA on a head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peft import LoraConfig

from hf_dart.drafters.adapters import LAYERS
from hf_dart.drafters.trained import TrainedDrafter


@dataclass
class LoraArguments:
    """LoRA on a head, for `HfArgumentParser`; `apply_lora` does what they say."""

    lora_rank: int | None = field(default=None, metadata={"help": "train LoRA of this rank; default: all weights"})
    lora_alpha: float | None = field(default=None, metadata={"help": "its scale times the rank; default: 2 rank"})
    lora_targets: list[str] | None = field(
        default=None, metadata={"help": f"modules that it is put on; default: {' '.join(LAYERS)}, and fc"}
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "of what goes into LoRA"})
    copy_layer: str | None = field(
        default=None,
        metadata={"help": "a new head's layers are frozen copies of the target's from this one on, or its 'last'"},
    )

    def head_options(self) -> dict[str, Any]:
        """Options of `DartHead.from_target`.

        Raises:
            ValueError: `copy_layer` is no number.
        """
        if self.copy_layer is None:
            return {}
        if self.copy_layer != "last" and not self.copy_layer.isdigit():
            raise ValueError(f"copy_layer is {self.copy_layer!r}; give a layer's number, from 0, or 'last'.")
        return {"copy_layer": self.copy_layer if self.copy_layer == "last" else int(self.copy_layer)}


def apply_lora(head: TrainedDrafter, arguments: LoraArguments) -> TrainedDrafter:
    """Put LoRA on a head as `arguments` say; without a rank the head stays as it is.

    Raises:
        ValueError: an argument is out of range, or the head takes no adapter (`DartHead.add_adapter`).
    """
    if arguments.lora_rank is None:
        return head
    alpha = 2 * arguments.lora_rank if arguments.lora_alpha is None else arguments.lora_alpha
    if arguments.lora_rank < 1 or not 0 <= arguments.lora_dropout < 1 or not 0 < alpha < float("inf"):
        raise ValueError(
            f"lora_rank is {arguments.lora_rank}, lora_alpha {alpha} and lora_dropout {arguments.lora_dropout}; give a "
            "rank of 1 or more, a finite alpha above 0 and a dropout in [0, 1)."
        )
    lora = LoraConfig(
        r=arguments.lora_rank,
        lora_alpha=alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=arguments.lora_targets,
    )
    head.add_adapter(lora, "default")
    return head
