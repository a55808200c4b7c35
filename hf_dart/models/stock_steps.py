"""Stock's own loop, a token at a time: what `generate` would hand to the target, and at which positions."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache

from hf_dart.models.devices import users_default

# Arguments for text and for running it: those that stock passes the target with every token and drafts are verified
# with too, or need not be, such as `cache_position` for a model's own code; and those that it drops after the prompt.
_STEP = {
    *("attention_mask", "cache", "cache_params", "cache_position", "input_ids", "inputs_embeds", "labels"),
    *("logits_to_keep", "output_hidden_states", "past_key_values", "position_ids", "return_dict", "use_cache"),
}
# With these, processors of multimodal models mark the tokens of images; all are 0 in plain text.
_MARKS = ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids")


# transformers >= 5.24 has one name for every model's cache, in `generate` and in a forward.
_STOCK_STEP = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _STOCK_STEP else "past_key_values"


@cache
def _arguments(forward: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class's forward, which every call asks for."""
    return inspect.signature(forward).parameters


def cache_name(model: nn.Module) -> str:
    """Return the name of a model's argument for a cache; before transformers 5.24, Mamba had one of its own."""
    own = "cache_params" in _arguments(type(model).forward)
    return "cache_params" if own and CACHE == "past_key_values" else CACHE


def cache_after(target: PreTrainedModel, outputs: Any, given: Cache) -> Any:
    """Return the cache that stock goes on with after a forward: that of its outputs, or else the one given to it."""
    found = outputs.get(cache_name(target))
    return given if found is None else found


def takes_positions(target: PreTrainedModel) -> bool:
    """Return True if the target takes `position_ids`; otherwise it counts positions itself."""
    # Look at the class: a user's replacement of an instance's `forward` may not name all arguments that it passes on.
    parameters = _arguments(type(target).forward)
    return "position_ids" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def next_inputs(
    target: PreTrainedModel, ids: Tensor, outputs: Any, model_kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs that stock's loop gives the forward for the last of `ids` [B, T], and its later arguments.

    `outputs` are those of the forward over all tokens before, into which `model_kwargs` went; these are not changed.
    """
    # By the name that stock uses: some families need it.
    model_kwargs = target._update_model_kwargs_for_generation(outputs, dict(model_kwargs), is_encoder_decoder=False)
    with users_default():
        return target.prepare_inputs_for_generation(ids, next_sequence_length=1, **model_kwargs), model_kwargs


def position_shift(target: PreTrainedModel, position_ids: Tensor | None, pads: list[int], total: int) -> Tensor | None:
    """Return the distance [B] of stock's positions for the target from those of each row's text; None if 0.

    Where it tells several kinds of positions (of text, time, height and width), [K, B], of each kind. They lie below
    after an image, which takes up more tokens than positions. A target that is told none counts slots, so that padding
    counts too. `position_ids` [B or 1, 1] or [K, B or 1, 1] are those of a token after `total` slots.
    """
    if not takes_positions(target):
        return None
    own = torch.tensor([total - pad for pad in pads])
    if position_ids is None:
        shift = torch.tensor(pads)
    elif position_ids.ndim not in (2, 3) or position_ids.shape[-2] not in (1, len(pads)):
        raise ValueError(
            f"{type(target).__name__} prepares positions of shape {list(position_ids.shape)} for {len(pads)} rows, "
            "which drafts do not follow; leave assistant= out."
        )
    else:
        shift = position_ids[..., -1].cpu() - own
    return shift if shift.ndim > 1 or bool(shift.any()) else None


def extra_inputs(target: PreTrainedModel, inputs: Mapping[str, Any]) -> list[str]:
    """Return the keyword arguments of a forward that say more than text: images, sounds, and marks of their tokens."""
    # Multimodal models ignore blank marks, but for PaliGemma, whose prefix they are; models of text have embeddings.
    ignores_blank = _is_multimodal(target) and target.config.model_type != "paligemma"

    def says_nothing(name: str, value: Any) -> bool:
        if isinstance(value, Tensor):
            return ignores_blank and name in _MARKS and not bool(value.any())
        return value is None or (isinstance(value, dict) and not value)

    return [name for name, value in inputs.items() if name not in _STEP and not says_nothing(name, value)]


def refuse_marks(target: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> None:
    """Raise for marks of the prompt's tokens to a model of text, such as GPT-2, which has embeddings for them."""
    marks = [name for name in extra_inputs(target, model_kwargs) if name in _MARKS]
    if marks and not _is_multimodal(target):
        raise ValueError(
            f"{type(target).__name__} embeds {' and '.join(marks)} with every token, and drafts are not verified with "
            "that; leave it out, or leave assistant= out."
        )


def _is_multimodal(target: PreTrainedModel) -> bool:
    return target.config.get_text_config(decoder=True) is not target.config


class StockSteps:
    """Stock's greedy loop over known tokens, after left-padded prompts `ids` [B, T].

    The cache is empty, or holds the prompts. `shift` is the `position_shift` of the last step.
    """

    def __init__(self, target: PreTrainedModel, ids: Tensor, pads: list[int], cache: Any) -> None:
        self._target, self._ids, self._pads = target, ids, pads
        self._cache = cache_name(target)
        mask = (torch.arange(ids.shape[1]) >= torch.tensor(pads)[:, None]).long().to(ids.device)
        kwargs: dict[str, Any] = {"attention_mask": mask, self._cache: cache, "use_cache": True}
        # `generate` too looks at the instance's forward.
        if "position_ids" in inspect.signature(target.forward).parameters:
            asked = {**kwargs, self._cache: None}
            kwargs["position_ids"] = target._prepare_position_ids_for_generation(ids, asked)
        if not any(pads):
            kwargs["attention_mask"] = None
        if target._supports_logits_to_keep():
            kwargs["logits_to_keep"] = 1
        self._kwargs = kwargs
        self.shift: Tensor | None = None

    def prefill(self) -> Any:
        """Run the prompt; the outputs, with the cache that stock goes on with among them."""
        inputs = self._target.prepare_inputs_for_generation(self._ids, is_first_iteration=True, **self._kwargs)
        self._outputs = self._run(inputs)
        self._outputs[self._cache] = cache_after(self._target, self._outputs, self._kwargs[self._cache])
        return self._outputs

    def resumed(self, outputs: Any) -> StockSteps:
        """Go on from the cache, as if these outputs of a prefill were those of this prompt."""
        self._outputs = copy.copy(outputs)
        self._outputs[self._cache] = self._kwargs[self._cache]
        return self

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [B, n, V] of the next tokens [B, n], one by one."""
        logits = []
        for token in tokens.split(1, dim=1):
            slots = self._ids.shape[1]
            self._ids = torch.cat([self._ids, token], dim=1)
            inputs, self._kwargs = next_inputs(self._target, self._ids, self._outputs, self._kwargs)
            self.shift = position_shift(self._target, inputs.get("position_ids"), self._pads, slots)
            self._outputs = self._run(inputs)
            logits.append(self._outputs.logits[:, -1:])
        return torch.cat(logits, dim=1)

    def _run(self, inputs: dict[str, Any]) -> Any:
        with users_default():
            return self._target(**inputs, return_dict=True)
