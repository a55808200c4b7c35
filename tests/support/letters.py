"""Tokenizers of single letters."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast


def letters(order: str) -> Any:
    """A tokenizer whose ids are the places of letters in `order`."""
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(order)}, []))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
