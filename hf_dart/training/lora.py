"""Options of training for LoRA on a head."""

from __future__ import annotations

from dataclasses import dataclass

from peft import LoraConfig

from hf_dart.drafters.adapters import LAYERS
from hf_dart.drafters.trained import TrainedDrafter
from hf_dart.training.options import option


@dataclass
class LoraArguments:
    """Options of LoRA on a head, for `HfArgumentParser`; `apply_lora` puts it there."""

    lora_rank: int | None = option(None, "train LoRA of this rank; default: all weights")
    lora_alpha: float | None = option(None, "its scale times the rank; default: 2 rank")
    lora_targets: list[str] | None = option(None, f"modules that it is put on; default: {' '.join(LAYERS)}, and fc")
    lora_dropout: float = option(0.0, "of what goes into LoRA")
    copy_layer: str | None = option(
        None, "a new head's layers are frozen copies of the target's from this one on, or its 'last'"
    )


def apply_lora(head: TrainedDrafter, arguments: LoraArguments) -> TrainedDrafter:
    """Put LoRA on a head as `arguments` say; without a rank the head stays as it is."""
    rank = arguments.lora_rank
    if rank is None:
        return head
    if head.adapted:
        raise ValueError("The head has an adapter; leave lora_rank out to train that one, or merge it into the head.")
    lora = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if arguments.lora_alpha is None else arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=arguments.lora_targets,
    )
    head.add_adapter(lora, "default")
    return head
