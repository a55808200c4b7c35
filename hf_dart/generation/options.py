"""What cannot be exact is refused here, each with one sentence that says the mend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, StaticLayer
from transformers.generation import GenerationMode
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from hf_dart.engine.attention import attention_of
from hf_dart.generation.stock_layers import (
    SIMPLE_LAYERS,
    DummyLayer,
    DynamicIndexedLayer,
    attention_layers,
    held_by,
)
from hf_dart.proposal import Drafter

_LAYERS = (*SIMPLE_LAYERS, DynamicIndexedLayer, DummyLayer)
_ATTENTION = ("eager", "sdpa")
# Index heads from which on a score of exactly 0 is no matter: one in 4 billion.
_INDEX_HEADS = 32
# What asks `generate` for other modes than greedy search and sampling.
_OTHER_MODES = (
    "constraints",
    "force_words_ids",
    "penalty_alpha",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
)
# What stock hands the model at every step, and drafts are verified with too; or drops.
_INPUTS = {
    "attention_mask",
    "inputs_embeds",
    "labels",  # dropped
    "logits_to_keep",
    "mm_encoder_outputs",
    "output_hidden_states",
    "past_key_values",
    "position_ids",
    "use_cache",
}
# Shares of heads that no causal LM has: "classifier_dropout", "summary_first_dropout".
_OTHER_HEADS = ("classifier", "summary")
# With these, processors of multimodal models mark the tokens of images; all are 0 in plain text.
_KINDS_OF_TOKENS = ("mm_token_type_ids", "token_type_ids")


def refuse_model(model: Any) -> None:
    """Raise for targets that cannot verify a tree.

    Raises:
        ValueError: encoder-decoder models, active dropout, aLoRA adapters, attention that takes no tree mask.
    """
    refuse_target(model)
    attention = attention_of(model)
    if attention not in _ATTENTION:
        raise ValueError(
            f"Attention {attention!r} takes no tree mask; call model.set_attn_implementation('sdpa') "
            "(or 'eager') before generating."
        )


def refuse_target(model: Any) -> None:
    """Raise for targets that no draft serves, tree or chain.

    Raises:
        ValueError: encoder-decoder models, active dropout, aLoRA adapters.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model; hf_dart drafts for decoder-only models. "
            "Call generate without assistant=."
        )
    _refuse_activated_adapters(model)
    if model.training or _drops_out(model):
        raise ValueError(
            "The target, or a part of it, is in train mode, where dropout makes its tokens random; call model.eval() "
            "first."
        )


def refuse_ties(model: Any, slots: int) -> None:
    """Raise where a model may choose the entries that it attends to by their slots.

    Indexers (DeepSeek V3.2, GLM-MoE-DSA, AXK2) score an entry by ReLUs of a few heads: it is exactly 0 where all of
    them are, with a chance of about 2 ** -heads, and among equal scores `topk` goes by slots, which those of a tree are
    not.

    Args:
        slots: of the longest text.

    Raises:
        ValueError: there are few heads, and texts longer than what all is chosen of.
    """
    text = model.config.get_text_config(decoder=True)
    chosen, heads = getattr(text, "index_topk", None), getattr(text, "index_n_heads", None)
    if chosen and heads and heads < _INDEX_HEADS and slots > chosen:
        raise ValueError(
            f"{type(model).__name__} chooses {chosen} of {slots} entries by scores of {heads} heads, which are often "
            f"tied, and then by their slots, which differ in a token tree; set max_length to {chosen} or less, or call "
            "generate without assistant=."
        )


def refuse_drafter(drafter: Drafter[Any]) -> None:
    """Raise for drafters that would draw from the generator that tokens are drawn from.

    Raises:
        ValueError: active dropout.
    """
    if isinstance(drafter, nn.Module) and _drops_out(drafter):
        raise ValueError(
            "The drafter is in train mode, where dropout moves the generator that tokens are drawn from; call its "
            "eval() first."
        )


def _drops_out(model: nn.Module) -> bool:
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


def refuse_options(
    model: Any, generation_config: Any, input_ids: Tensor, synced_gpus: bool, kwargs: dict[str, Any]
) -> None:
    """Raise for options of `generate` whose result a drafted run could not equal.

    Raises:
        ValueError: the message names the option and what to do instead.
    """
    config = generation_config
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        asked_by = [name for name in _OTHER_MODES if getattr(config, name, None)] or [f"num_beams={config.num_beams}"]
        raise ValueError(
            f"Drafts serve greedy search and sampling, not {mode.value}; leave out {' and '.join(asked_by)}, or leave "
            "assistant= out."
        )
    named = [
        (config.use_cache is False, "use_cache=False", "use_cache=True"),
        (bool(config.is_assistant), "is_assistant=True", "is_assistant=False"),
        (bool(config.output_attentions), "output_attentions=True", "output_attentions=False"),
        (isinstance(config.output_hidden_states, list), "output_hidden_states=[...]", "output_hidden_states=True"),
        (isinstance(kwargs.get("logits_to_keep"), Tensor), "logits_to_keep=tensor(...)", "a number"),
        (
            synced_gpus or _is_sharded(model),
            "synced_gpus (FSDP or ZeRO-3 generation)",
            "a model that is whole on each process",
        ),
    ]
    for refused, option, instead in named:
        if refused:
            raise ValueError(f"{option} cannot be drafted exactly; use {instead}, or leave assistant= out.")
    multimodal = "mm_encoder_outputs" in kwargs
    if kwargs.get("mm_encoder_outputs"):  # generate itself passes an empty one with text alone
        raise ValueError("Drafts are not verified behind images or videos; leave them out, or leave assistant= out.")
    for name, value in kwargs.items():
        blank = multimodal and name in _KINDS_OF_TOKENS and value is not None and not bool(value.any())
        if name not in _INPUTS and value is not None and not blank:
            raise ValueError(f"Drafts are not verified with {name}; leave it out, or leave assistant= out.")
    _refuse_soft_prompts(model)
    _refuse_shapes(input_ids, kwargs.get("inputs_embeds"), kwargs.get("attention_mask"))


def _refuse_shapes(input_ids: Tensor, embeddings: Tensor | None, mask: Tensor | None) -> None:
    """Raise for what is no prompt, and for parts that are not of one."""
    prompt = input_ids if embeddings is None else embeddings
    rows, dimensions = len(input_ids), 2 if embeddings is None else 3
    if input_ids.ndim != 2 or prompt.ndim != dimensions or len(prompt) != rows:
        raise ValueError(
            f"A prompt of shape {list(prompt.shape)} is no batch of {rows} rows; give input_ids [rows, tokens] or "
            "inputs_embeds [rows, tokens, width]."
        )
    if 0 in prompt.shape[:2]:
        raise ValueError("The prompt is empty; give at least one row of at least one token.")
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"Token ids cannot be {input_ids.dtype}; pass input_ids.long().")
    if mask is not None and (mask.ndim != 2 or len(mask) != rows or mask.shape[1] < prompt.shape[1]):
        raise ValueError(
            f"An attention mask of shape {list(mask.shape)} does not fit a prompt of {rows} rows and "
            f"{prompt.shape[1]} tokens; give it one entry for each, and for each that is in the cache."
        )


def _is_sharded(model: Any) -> bool:
    """Do processes hold parts of the model, so that stock would keep them in step?"""
    alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    return not alone and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))


def _refuse_soft_prompts(model: Any) -> None:
    """Soft prompts have no token ids; a PEFT wrapper shows itself in what it overrides during its `generate`."""
    wrapper = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    config = getattr(wrapper, "active_peft_config", None)
    if config is not None and config.is_prompt_learning:
        raise ValueError(
            f"{type(config).__name__} puts soft prompts before the text, which no head was trained on; call generate "
            "without assistant=."
        )


def _refuse_activated_adapters(model: Any) -> None:
    """aLoRA adapts as many of the last tokens of a forward as its text would have, not the nodes of a tree."""
    for config in getattr(model, "peft_config", {}).values():
        if getattr(config, "alora_invocation_tokens", None) is not None:
            raise ValueError(
                "An aLoRA adapter works from its invocation tokens on, which it does not find in a token tree; call "
                "generate without assistant=."
            )


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
                f"This model keeps a {type(layer).__name__} of its past, from which rejected drafts cannot be taken "
                "back; it is not supported yet, call generate without assistant=."
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
            f"The cache holds {held} entries behind a prompt of {total} slots: the model, or a hook on it, adds or "
            "drops some, and drafts would be verified at other positions; call generate without assistant=."
        )


def refuse_cache_length(
    cache: Cache, windows: list[int | None], cached: int, first: int, total: int, slots: int
) -> None:
    """Raise for a cache that does not fit the prompt, or is too short for the answer.

    Args:
        windows: how many positions each of its attention layers sees; None for all.
        cached: slots that the cache holds.
        first: slot of the first token (or embedding) that is passed.
        total: slots of prompt and cached prefix.
        slots: that the call may need.

    Raises:
        ValueError: stock would feed the prompt twice, leave a gap, or (unless every row ended early) run over the end
            of a static cache.
    """
    if first > 0 == cached:
        raise ValueError(
            f"The attention mask has {total} entries for a prompt of {total - first} tokens and nothing is cached; "
            "give it one for each token."
        )
    if cached >= total:
        raise ValueError(
            f"The cache holds {cached} tokens and the prompt has {total}, but the target has to run over the last one; "
            f"crop the cache by {cached - total + 1} or add new tokens to the prompt."
        )
    if first not in (0, cached):
        raise ValueError(
            f"The cache holds {cached} tokens and input_ids begin at token {first}; pass the whole text, or all that "
            "the cache does not hold."
        )
    rooms = [
        layer.max_cache_len
        for layer, window in zip(attention_layers(cache), windows, strict=True)
        # One that is shorter than the window of its layer would be another window.
        if isinstance(layer, StaticLayer) and (not layer.is_sliding or window is None or layer.max_cache_len < window)
    ]
    if rooms and min(rooms) < slots:
        raise ValueError(
            f"This StaticCache has room for {min(rooms)} tokens and this call may need {slots}; pass a longer one or a "
            "smaller max_new_tokens."
        )


def left_padding(attention_mask: Tensor | None, position_ids: Tensor | None, total: int, batch_size: int) -> list[int]:
    """Pads in front of each row.

    Args:
        attention_mask: [B, total] as `generate` prepared it; None if nothing is padded.
        position_ids: [B, P] likewise; or [R, B, P], several kinds of positions as multimodal models have them.
        total: slots of prompt and cached prefix.

    Raises:
        ValueError: masked slots elsewhere than in front, or positions that are not the usual ones.
    """
    if attention_mask is None:
        pads = [0] * batch_size
    else:
        seen = attention_mask.bool()
        if bool((seen[:, :-1] & ~seen[:, 1:]).any()):
            raise ValueError(
                "The attention mask hides tokens behind visible ones; pad on the left (tokenizer.padding_side='left')."
            )
        pads = (~seen).sum(-1).tolist()
        if total in pads:
            raise ValueError("A row of the batch is all padding; give every row at least one token.")
    if position_ids is not None:
        usual = _usual(position_ids, pads, total)
        if not usual and position_ids.ndim > 2:
            raise ValueError(
                "This prompt has positions of its own, as those with images have, which drafts do not follow; give "
                "text alone, or leave assistant= out."
            )
        if not usual:
            raise ValueError("position_ids other than the usual ones are not supported; leave them out.")
    return pads


def _usual(position_ids: Tensor, pads: list[int], total: int) -> bool:
    """Does each row end at the position that the tokens before it leave?"""
    last = torch.tensor([total - pad - 1 for pad in pads])
    if 0 in position_ids.shape or position_ids.shape[-2:-1] not in ((1,), last.shape):
        return False
    return not bool((position_ids[..., -1].cpu() != last).any())
