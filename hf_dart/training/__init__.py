"""Training drafters on `transformers.Trainer`: rows of tokens, losses, and one trainer per kind of drafter."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_dart.training.objective import losses

if TYPE_CHECKING:
    from hf_dart.training.data.images import image_row
    from hf_dart.training.data.packing import PackedTokens, tokenize
    from hf_dart.training.data.sources import DataArguments, load_rows
    from hf_dart.training.trainers.arguments import DartTrainingArguments
    from hf_dart.training.trainers.dart import DartTrainer
    from hf_dart.training.trainers.diffusion import DiffusionTrainer, DiffusionTrainingArguments
    from hf_dart.training.trainers.eagle import EagleTrainer, EagleTrainingArguments
    from hf_dart.training.trainers.edit import EditTrainer, EditTrainingArguments
    from hf_dart.training.trainers.evaluation import DecodingCallback

_HOMES = {
    "DartTrainer": "trainers.dart",
    "DartTrainingArguments": "trainers.arguments",
    "DataArguments": "data.sources",
    "DecodingCallback": "trainers.evaluation",
    "DiffusionTrainer": "trainers.diffusion",
    "DiffusionTrainingArguments": "trainers.diffusion",
    "EagleTrainer": "trainers.eagle",
    "EagleTrainingArguments": "trainers.eagle",
    "EditTrainer": "trainers.edit",
    "EditTrainingArguments": "trainers.edit",
    "PackedTokens": "data.packing",
    "image_row": "data.images",
    "load_rows": "data.sources",
    "tokenize": "data.packing",
}
__all__ = [
    "DartTrainer", "DartTrainingArguments", "DataArguments", "DecodingCallback", "DiffusionTrainer",
    "DiffusionTrainingArguments", "EagleTrainer", "EagleTrainingArguments", "EditTrainer", "EditTrainingArguments",
    "PackedTokens", "image_row", "load_rows", "losses", "tokenize",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Imported on first use: the losses need none of the packages that the trainers do.
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
