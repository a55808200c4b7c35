"""Checks that a drafter was made for a target; every mismatch is one sentence that names the remedy."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_dart.drafters.base import Drafter
from hf_dart.models.features import layer_count, lent_modules, table_of
from hf_dart.models.tokenizers import same_vocabulary, template_hash, tokenizer_beside


def unwrapped(model: Any) -> Any:
    """Return the model inside wrappers of PEFT and `torch.compile`, whose `generate` ends in that model's own."""
    if isinstance(model, Drafter):
        raise TypeError(f"{type(model).__name__} is a drafter and no target; give the target first, then the drafter.")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{model!r:.100} is no model of transformers; load one with AutoModelForCausalLM.from_pretrained, and give "
            "that."
        )
    while True:
        base = getattr(model, "get_base_model", lambda: None)
        inner = getattr(model, "_orig_mod", None) or base()
        if inner is None or inner is model:
            if not hasattr(model, "config"):
                raise TypeError(
                    f"{type(model).__name__} is no model of transformers; give the one inside it (`.module` of "
                    "DataParallel)."
                )
            return model
        model = inner


def check_compatible(config: Any, target: PreTrainedModel, tokenizer: Any = None) -> None:
    """Raise a `ValueError` that names both sides if a drafter's config does not fit a target or its tokenizer."""
    made_for = config.made_for
    embeddings, lm_head = lent_modules(unwrapped(target))
    table = table_of(embeddings)
    text = target.config.get_text_config(decoder=True)
    has = {
        "hidden size": int(text.hidden_size),
        "embedding width": int(table.embedding_dim),
        "LM head width": getattr(lm_head, "in_features", None),
        "number of layers": layer_count(target),
    }
    for what, wanted in config.needs.items():
        found = has[what]
        if wanted != found and found is not None:
            raise ValueError(
                f"This drafter was made for {made_for} with {what} {wanted}, but {_name(target)} has {found}; load a "
                "drafter that was made for this target, or train one with from_target(model)."
            )
    _check_vocabulary(config, target, tokenizer, int(table.num_embeddings))
    template = getattr(tokenizer, "chat_template", None)
    if config.chat_template_hash and isinstance(template, str) and template_hash(template) != config.chat_template_hash:
        warnings.warn(
            "This head was trained on conversations with another chat template than this tokenizer's; the output is "
            "the target's own all the same, but fewer drafts may be accepted.",
            stacklevel=2,
        )


def _check_vocabulary(config: Any, target: PreTrainedModel, tokenizer: Any, rows: int) -> None:
    tokenizer = tokenizer_beside(target) if tokenizer is None else tokenizer
    if config.tokenizer_hash is not None and tokenizer is not None:
        if not same_vocabulary(config.tokenizer_hash, tokenizer, rows):
            raise ValueError(
                f"This drafter was trained with the tokenizer of {config.made_for}, and that of {_name(target)} has "
                "other tokens or ids; use the target that the drafter was trained for, or, if tokens were only added "
                "for the training, pass tokenizer= with them."
            )
        # Equal ids: tables that differ only in padding rows are of one vocabulary.
        return
    if config.vocab_size != rows:
        known = config.tokenizer_hash is not None
        padded = ", or, if they differ in padding rows only, pass tokenizer= so that the vocabularies can be compared"
        raise ValueError(
            f"This drafter was made for an embedding table of {config.vocab_size} rows and {_name(target)} has {rows}; "
            f"load a drafter that was made for this target{padded if known else ''}."
        )


def _name(target: PreTrainedModel) -> str:
    return target.config.name_or_path or type(target).__name__
