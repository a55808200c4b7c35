"""Refusals of targets and caches that cannot verify token trees, in one sentence each that names the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import DynamicCache, GenerationMixin, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache

from hf_dart.cache import stock_layers
from hf_dart.cache.stock_layers import attention_layers, held_by, keeps_entries, keeps_states

_LAYERS = (*stock_layers.SIMPLE_LAYERS, stock_layers.DummyLayer, stock_layers.LinearAttentionLayer)
# Kinds of decoders that are too rare to be worth their code, and why they take no tree.
_FAMILIES = {
    "glm_image_text": "gives its tokens places in an image, which drafts do not follow",
    "moshi": "has windows in its cache alone, which its masks do not know",
    "recurrent_gemma": "keeps running states in its modules, from which rejected drafts cannot be taken back",
}
# Dropout rates of heads that no causal LM has: "classifier_dropout", "summary_first_dropout".
_OTHER_HEADS = ("classifier", "summary")


def refuse_target(model: PreTrainedModel) -> None:
    """Raise for targets that no draft serves, tree or chain."""
    if getattr(type(model), "_sample", None) is not GenerationMixin._sample:  # what our loop stands in for
        raise ValueError(
            f"{type(model).__name__} does not generate a token at a time as transformers' GenerationMixin does, which "
            "is what drafts are for; call generate without assistant=."
        )
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model; hf_dart drafts for decoder-only models. "
            "Call generate without assistant=."
        )
    if why := _FAMILIES.get(model.config.get_text_config(decoder=True).model_type):
        raise ValueError(f"{type(model).__name__} {why}; call generate without assistant=.")
    adapters = getattr(model, "peft_config", {}).values()
    if any(getattr(one, "alora_invocation_tokens", None) is not None for one in adapters):
        raise ValueError(
            "An aLoRA adapter works from its invocation tokens on, which it does not find in a token tree; call "
            "generate without assistant=."
        )
    training = in_training(model)
    if any(map(_draws, training)):
        raise ValueError(
            "The target, or a part of it, is in train mode, where dropout makes its tokens random; call model.eval() "
            "first."
        )
    if any(getattr(part, "gradient_checkpointing", False) for part in training):
        raise ValueError(
            "In train mode with gradient checkpointing the target keeps no cache; call model.eval() first, or turn "
            "gradient checkpointing off."
        )


def drops_out(model: nn.Module) -> bool:
    """Return True if a part of a model is in train mode and would draw numbers there."""
    return any(map(_draws, in_training(model)))


def _draws(part: nn.Module) -> bool:
    """Return True if a module would draw numbers in train mode, by dropout rates that it or its config names."""
    if isinstance(part, _DropoutNd):
        return part.p > 0
    named = {**getattr(getattr(part, "config", None), "__dict__", {}), **vars(part)}
    return any(
        type(value) in (int, float) and value > 0 and ("dropout" in name or "jitter" in name)
        for name, value in named.items()
        if not name.startswith(_OTHER_HEADS)
    )


def parts_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model; several times faster than `model.modules()`, as is felt in every call."""
    found = [model]
    for part in found:
        found.extend(inner for inner in part._modules.values() if inner is not None)
    return found


def in_training(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that are in train mode."""
    return [part for part in parts_of(model) if part.training]


def parameters_of(model: nn.Module) -> list[Tensor]:
    """All weights of a model, each once; several times faster than `model.parameters()`."""
    found = (weight for part in parts_of(model) for weight in part._parameters.values())
    return list(dict.fromkeys(weight for weight in found if weight is not None))


def with_row_adapters(model: nn.Module) -> Iterator[tuple[nn.Module, list[int]]]:
    """Yield modules with PEFT's hooks for `adapter_names=`, an adapter for each row, and the keys of these hooks."""
    for part in parts_of(model):
        hooks = part._forward_pre_hooks.items()
        if keys := [key for key, hook in hooks if "adapter_names" in getattr(hook, "keywords", {})]:
            yield part, keys


def refuse_cache(cache: Any) -> Cache:
    """Return the cache if it is one whose rounds can be undone, raise otherwise."""
    offloading = getattr(cache, "offloading", False)
    if type(cache) not in (DynamicCache, StaticCache) or offloading:
        raise ValueError(
            f"A {type(cache).__name__}{' with offloading' if offloading else ''} cannot take back rejected drafts; "
            "leave cache_implementation out or pass a plain DynamicCache or StaticCache."
        )
    for layer in cache.layers:
        if type(layer) not in _LAYERS:
            raise ValueError(
                f"This model's cache has a {type(layer).__name__}, which cannot hold a token tree yet; call "
                "generate without assistant=."
            )
        if keeps_states(layer) and getattr(layer, "record_past", False):
            raise ValueError(
                "This cache records the past of its running states (activate_past_recording, which transformers' "
                "assisted generation calls), of which drafts leave none; pass the whole text with a new cache."
            )
    return cache


def refuse_compressed(cache: Cache, total: int) -> None:
    """Raise for a prefilled cache that does not hold every one of its `total` slots: position and entry part there.

    Hooks may drop some, as kvpress does, or layers of cross-attention hold an image.
    """
    if not any(map(keeps_entries, cache.layers)):
        return
    whole = [layer for layer in attention_layers(cache) if not getattr(layer, "is_sliding", False)]
    for held in (int(cache.get_seq_length()), *(held_by(layer)[0].shape[2] for layer in whole)):
        if held != total:
            raise ValueError(
                f"The cache holds {held} entries after a prompt of {total} slots: the model, or a hook on it, adds or "
                "drops some, and drafts would be verified at other positions; call generate without assistant=."
            )
