"""Training draft heads on `transformers.Trainer`: blocks, losses, data, the trainer."""

from hf_dart.training.data import BlockCollator, Mixture, PackedTokens, tokenize
from hf_dart.training.evaluate import DecodingCallback
from hf_dart.training.trainer import DartTrainer, DartTrainingArguments

__all__ = [
    "BlockCollator",
    "DartTrainer",
    "DartTrainingArguments",
    "DecodingCallback",
    "Mixture",
    "PackedTokens",
    "tokenize",
]
