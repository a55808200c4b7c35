"""Can this target verify token trees at all? What cannot is refused with one sentence that names the remedy."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache, StaticLayer

from hf_dart.cache.stock_layers import SIMPLE_LAYERS, DummyLayer, DynamicIndexedLayer, attention_layers, held_by
from hf_dart.target.attention import attention_of

_LAYERS = (*SIMPLE_LAYERS, DynamicIndexedLayer, DummyLayer)
_ATTENTION = ("eager", "sdpa")
# Shares of heads that no causal LM has: "classifier_dropout", "summary_first_dropout".
_OTHER_HEADS = ("classifier", "summary")


def refuse_model(model: PreTrainedModel) -> None:
    """Raise for targets that cannot verify a tree.

    Raises:
        ValueError: encoder-decoder models, active dropout, attention that takes no tree mask.
    """
    refuse_target(model)
    attention = attention_of(model)
    if attention not in _ATTENTION:
        raise ValueError(
            f"Attention {attention!r} takes no tree mask; call model.set_attn_implementation('sdpa') "
            "(or 'eager') before generating."
        )


def refuse_target(model: PreTrainedModel) -> None:
    """Raise for targets that no draft serves, tree or chain.

    Raises:
        ValueError: encoder-decoder models, active dropout.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model; hf_dart drafts for decoder-only models. "
            "Call generate without assistant=."
        )
    if model.training or drops_out(model):
        raise ValueError(
            "The target, or a part of it, is in train mode, where dropout makes its tokens random; call model.eval() "
            "first."
        )


def drops_out(model: nn.Module) -> bool:
    return any(part.training and _draws(part) for part in parts_of(model))


def _draws(part: nn.Module) -> bool:
    """Would a module draw numbers in train mode? Many call functions with a share that they, or their config, name."""
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


def refuse_cache(cache: Any) -> Cache:
    """Return the cache if it is one whose rounds can be undone, raise otherwise.

    Raises:
        ValueError: quantised, offloaded or encoder-decoder caches; linear-attention or state layers.
    """
    offloading = getattr(cache, "offloading", False)
    if type(cache) not in (DynamicCache, StaticCache) or offloading:
        raise ValueError(
            f"A {type(cache).__name__}{' with offloading' if offloading else ''} cannot take back rejected drafts; "
            "leave cache_implementation out or pass a plain DynamicCache or StaticCache."
        )
    for layer in cache.layers:
        if type(layer) not in _LAYERS and isinstance(layer, StaticLayer):
            raise ValueError(
                f"Entries of a {type(layer).__name__} cannot be taken back; leave cache_implementation out or pass a "
                "DynamicCache."
            )
        if type(layer) not in _LAYERS:
            raise ValueError(
                f"This model keeps a {type(layer).__name__}, a running state that a rejected draft would spoil; it is "
                "not supported yet, call generate without assistant=."
            )
    return cache


def refuse_compressed(cache: Cache, total: int) -> None:
    """Raise for a prefilled cache that does not hold every one of its `total` slots: position and entry part there.

    Raises:
        ValueError: hooks dropped some, as kvpress does.
    """
    whole = [layer for layer in attention_layers(cache) if not getattr(layer, "is_sliding", False)]
    held = min([int(cache.get_seq_length()), *(held_by(layer)[0].shape[2] for layer in whole)])
    if held != total:
        raise ValueError(
            f"The cache holds {held} entries behind a prompt of {total} slots: something compresses it, and drafts "
            "would be verified at other positions; take its hooks off the model, or leave assistant= out."
        )
