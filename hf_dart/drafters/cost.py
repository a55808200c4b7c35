"""Estimated cost of a draft, relative to a forward of the target over one token, by the weights that both read."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from hf_dart.models.devices import device_of
from hf_dart.models.features import lm_head_of
from hf_dart.models.support import parameters_of
from hf_dart.trees.costs import DRAFT_COST

_GROWTH = 0.1  # cost of growing and walking a tree

# Overhead of an operation besides reading its weight, in numbers read in that time: on a CPU and elsewhere.
_CALL, _LAUNCH = 400_000, 100_000_000


def sizes(module: nn.Module) -> list[int]:
    """Numbers in each weight of a module."""
    return [weight.numel() for weight in parameters_of(module)]


def model_sizes(model: PreTrainedModel) -> list[int]:
    """Numbers that a causal LM reads of each weight for one token: of embeddings of their own, next to none."""
    embeddings, lm_head = model.get_input_embeddings().weight, lm_head_of(model).weight
    return [0 if weight is embeddings is not lm_head else weight.numel() for weight in parameters_of(model)]


def relative_cost(target: PreTrainedModel, passes: int, own: Iterable[int]) -> float:
    """Cost of a draft of `passes` passes, each of which reads weights of sizes `own`."""
    call = _CALL if device_of(target.get_input_embeddings()).type == "cpu" else _LAUNCH
    own_time, target_time = (sum(size + call for size in part) for part in (own, model_sizes(target)))
    return max(DRAFT_COST, _GROWTH + passes * own_time / target_time)
