"""The tokenizer of a target: the one beside its weights, and the hash of a chat template."""

from __future__ import annotations

import hashlib

from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from transformers.utils import cached_file

from hf_dart.errors import sentence


def template_hash(template: str) -> str:
    """SHA-256 (16 hex digits) of a chat template."""
    return hashlib.sha256(template.encode()).hexdigest()[:16]


def tokenizer_beside(target: PreTrainedModel) -> Tokenizer | None:
    """The tokenizer stored beside the target's weights, if it is on this machine."""
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
    except (HFValidationError, OSError):  # the path of a folder that is gone is no name of a repository
        return None
    if path is None:
        return None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # of no class of its own
        raise ValueError(f"{path} is no tokenizer ({sentence(error)}); fetch the target again.") from error
