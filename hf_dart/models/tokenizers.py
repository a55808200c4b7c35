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

    With `rows`, tokens beyond an embedding table of so many rows, such as an added padding token, are left out.
    """
    if isinstance(tokenizer, str):
        raise TypeError(f"tokenizer= takes a tokenizer, not a name; give AutoTokenizer.from_pretrained({tokenizer!r}).")
    return hash_of_ids(tokenizer.get_vocab(), rows)


def same_vocabulary(known: str, tokenizer: Any, rows: int) -> bool:
    """Return True if `known` is this tokenizer's hash, with or without tokens beyond an embedding table's `rows`."""
    return known == vocabulary_hash(tokenizer, rows) or known == vocabulary_hash(tokenizer)


def template_hash(template: str) -> str:
    """SHA-256 (16 hex digits) of a chat template."""
    return hashlib.sha256(template.encode()).hexdigest()[:16]


def end_tokens(model: Any, tokenizer: Any = None) -> list[int]:
    """Return the tokens that end a text of a target; without any of its own, its tokenizer's."""
    ends = model.generation_config.eos_token_id
    ends = getattr(tokenizer, "eos_token_id", None) if ends is None else ends
    return [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [int(ends)]


def tokenizer_beside(target: PreTrainedModel) -> Tokenizer | None:
    """Return the tokenizer stored with the target's weights, if it is on this machine."""
    name = target.config.name_or_path
    if not name:
        return None
    try:
        reasons = ("missing_entries", "connection_errors", "gated_repo")
        silent = {f"_raise_exceptions_for_{reason}": False for reason in reasons}
        path = cached_file(name, "tokenizer.json", local_files_only=True, **silent)
    except (HFValidationError, OSError):  # the path of a deleted folder is no valid repository id
        return None
    if path is None:
        return None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises plain `Exception`s
        raise ValueError(f"{path} is no tokenizer ({sentence(error)}); fetch the target again.") from error
