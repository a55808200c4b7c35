"""Tokenizers of single letters."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def letters(order: str) -> Any:
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(order)}, []))
    return PreTrainedTokenizerFast(tokenizer_object=backend)
