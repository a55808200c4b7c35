"""What a draft costs, relative to a forward of the target over one token, by the weights that both read."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from hf_dart.models.devices import device_of
from hf_dart.models.features import lm_head_of
from hf_dart.trees.costs import DRAFT_COST

# What growing and walking a tree costs, relative to a forward of the target over one token.
_GROWTH = 0.1

# What an operation takes besides reading its weight, in weights that could be read meanwhile: on a CPU and elsewhere.
_CALL, _LAUNCH = 400_000, 100_000_000


def call_cost(target: PreTrainedModel) -> int:
    """What an operation takes on the target's device besides reading its weight, in weights."""
    return _CALL if device_of(target.get_input_embeddings()).type == "cpu" else _LAUNCH


def weights_read(module: nn.Module, call: int) -> int:
    """The weights that a forward over one token reads, and `call` for each of them that is a tensor."""
    return sum(weight.numel() + call for weight in module.parameters())


def model_read(model: PreTrainedModel, call: int) -> int:
    """The same of a causal LM, which reads a few rows of its embeddings."""
    embeddings, lm_head = model.get_input_embeddings(), lm_head_of(model)
    unread = 0 if embeddings.weight is lm_head.weight else embeddings.weight.numel()
    return weights_read(model, call) - unread


def relative_cost(passes: int, own: int, target: PreTrainedModel) -> float:
    """Cost of a draft of so many passes, each of which reads `own` weights."""
    return max(DRAFT_COST, _GROWTH + passes * own / model_read(target, call_cost(target)))
