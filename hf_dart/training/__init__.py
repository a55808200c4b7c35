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

_NAMES = {
    "data.images": ["image_row"],
    "data.packing": ["PackedTokens", "tokenize"],
    "data.sources": ["DataArguments", "load_rows"],
    "trainers.arguments": ["DartTrainingArguments"],
    "trainers.dart": ["DartTrainer"],
    "trainers.diffusion": ["DiffusionTrainer", "DiffusionTrainingArguments"],
    "trainers.eagle": ["EagleTrainer", "EagleTrainingArguments"],
    "trainers.edit": ["EditTrainer", "EditTrainingArguments"],
    "trainers.evaluation": ["DecodingCallback"],
}
__all__ = sorted(["losses", *(name for names in _NAMES.values() for name in names)])


def __getattr__(name: str) -> Any:
    # Imported on first use: the losses need none of the packages that the trainers do.
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
