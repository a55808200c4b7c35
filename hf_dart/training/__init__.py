"""Training draft heads on `transformers.Trainer`: blocks, losses, data, the trainer."""

from hf_dart.training.arguments import DartTrainingArguments
from hf_dart.training.data import PackedTokens, tokenize
from hf_dart.training.diffusion import DiffusionTrainer, DiffusionTrainingArguments
from hf_dart.training.eagle import EagleTrainer, EagleTrainingArguments
from hf_dart.training.evaluate import DecodingCallback
from hf_dart.training.refining import EditTrainer, EditTrainingArguments
from hf_dart.training.sources import DataArguments, load_rows
from hf_dart.training.trainer import DartTrainer

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
    "load_rows",
    "tokenize",
]
