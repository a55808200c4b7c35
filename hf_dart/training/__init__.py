"""Training drafters on `transformers.Trainer`: rows of tokens, losses, and one trainer per kind of drafter."""

from hf_dart.training.data.images import image_row
from hf_dart.training.data.packing import PackedTokens, tokenize
from hf_dart.training.data.sources import DataArguments, load_rows
from hf_dart.training.objective import losses
from hf_dart.training.trainers.arguments import DartTrainingArguments
from hf_dart.training.trainers.dart import DartTrainer
from hf_dart.training.trainers.diffusion import DiffusionTrainer, DiffusionTrainingArguments
from hf_dart.training.trainers.eagle import EagleTrainer, EagleTrainingArguments
from hf_dart.training.trainers.edit import EditTrainer, EditTrainingArguments
from hf_dart.training.trainers.evaluation import DecodingCallback

__all__ = [
    "DartTrainer",
    "DartTrainingArguments",
    "DataArguments",
    "DecodingCallback",
    "DiffusionTrainer",
    "DiffusionTrainingArguments",
    "EagleTrainer",
    "EagleTrainingArguments",
    "EditTrainer",
    "EditTrainingArguments",
    "PackedTokens",
    "image_row",
    "load_rows",
    "losses",
    "tokenize",
]
