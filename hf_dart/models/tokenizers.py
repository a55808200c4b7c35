"""The tokenizer of a target: hashes of its vocabulary and chat template, and the one stored with its weights."""

from __future__ import annotations

import hashlib
from typing import Any

from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from transformers.utils import cached_file

from hf_dart.errors import sentence
from hf_dart.trees.vocabulary import hash_of_ids


def vocabulary_hash(tokenizer: Any, rows: int | None = None) -> str:
    """SHA-256 (16 hex digits) of a tokenizer's token-to-id map, added tokens included.

    Two tokenizers with one hash give every id the same text, which is all that a drafter needs; padding rows
    of the embedding table are not counted. With `rows`, tokens that a table of so many rows has no embeddings of, such
    as a padding token that was added for training, are not counted either.
    """
    return hash_of_ids(tokenizer.get_vocab(), rows)


def same_vocabulary(known: str, tokenizer: Any, rows: int) -> bool:
    """Return True if `known` is this tokenizer's hash, with or without tokens beyond an embedding table's `rows`."""
    return known in (vocabulary_hash(tokenizer, rows), vocabulary_hash(tokenizer))


def template_hash(template: str) -> str:
    """SHA-256 (16 hex digits) of a chat template."""
    return hashlib.sha256(template.encode()).hexdigest()[:16]


def tokenizer_beside(target: PreTrainedModel) -> Tokenizer | None:
    """Return the tokenizer stored with the target's weights, if it is on this machine."""
    name = target.config.name_or_path
    if not name:
        return None
    try:
        path = cached_file(
            name,
            "tokenizer.json",
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
    except (HFValidationError, OSError):  # the path of a deleted folder is no valid repository id
        return None
    if path is None:
        return None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises plain `Exception`s
        raise ValueError(f"{path} is no tokenizer ({sentence(error)}); fetch the target again.") from error
