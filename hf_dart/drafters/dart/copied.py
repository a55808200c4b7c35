"""Heads whose decoder layers are the target's own: copied, frozen, adapted with LoRA.

A DART layer reads pairs of width E + H, which no layer of the target fits. So such a head has the "stream" form: what
goes into its first layer is fc(features) + embedding_projection(embedding), which start as the hidden state that the
copied layer reads in the target, and zero. Untrained, a head of the target's last layers computes the target's logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.drafters.dart.configuration import DartConfig
from hf_dart.drafters.layers import rotation_at
from hf_dart.errors import sentence
from hf_dart.models.attention import added_mask, for_trees
from hf_dart.models.features import default_feature_layers, layer_count
from hf_dart.models.tolerance import same

_NAMES = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}
# Number of entries of a matrix that its fingerprint reads.
_SAMPLES = 1 << 16
# Rounding to 16 bits moves a fingerprint by some 0.002; those of two matrices are about 1 apart.
_TOLERANCE = 0.02


def fingerprint(weights: Iterable[Tensor]) -> list[float]:
    """Return a number per matrix, which rounding to another dtype hardly changes and another matrix does."""
    numbers = []
    for weight in weights:
        if weight.ndim < 2:
            continue
        entries = weight.detach().flatten()
        entries = entries[:: max(1, len(entries) // _SAMPLES)].cpu().double()
        pattern = torch.arange(len(entries), dtype=torch.float64, device="cpu").cos()
        numbers.append(round(float(entries @ pattern / entries.norm().clamp(min=1e-30)), 4))
    return numbers


def same_fingerprint(left: Iterable[float], right: Iterable[float]) -> bool:
    """Return True if two fingerprints are of the same weights, up to rounding to 16 bits."""
    one, other = [*left], [*right]
    return len(one) == len(other) and all(abs(a - b) < _TOLERANCE for a, b in zip(one, other, strict=True))


def copied_fields(target: PreTrainedModel, first: int | Literal["last"], **config: Any) -> dict[str, Any]:
    """Return fields of a `DartConfig` with copies of the target's layers from `first` on, updated by `config`."""
    count, depth = config.get("num_layers", 1), layer_count(target)
    first = depth - count if first == "last" else first
    states = [_weights(layer, target) for layer in _layers(target, first, count)]
    names = set(states[0])
    frequencies = getattr(getattr(target.get_decoder(), "rotary_emb", None), "inv_freq", None)
    fields: dict[str, Any] = {
        "input_form": "stream",
        "copied_layer": first,
        "feature_layers": default_feature_layers(depth),
        "attention_bias": "self_attn.q_proj.bias" in names,
        "output_bias": "self_attn.o_proj.bias" in names,
        "qk_norm": "self_attn.q_norm.weight" in names,
        "rope_frequencies": None if frequencies is None else frequencies.tolist(),
        "fingerprint": fingerprint(weight for state in states for weight in state.values()),
    }
    if (gate := states[0].get("mlp.gate_proj.weight")) is not None:
        fields["intermediate_size"] = len(gate)
    fields |= config
    return {**fields, "feature_layers": sorted({*fields["feature_layers"], first})}  # what the first of them reads


def initialise(head: Any, target: PreTrainedModel) -> None:
    """Start as the target's own layers: see the module's docstring."""
    config = head.config
    with torch.no_grad():
        head.fc.weight.zero_()
        # hidden_states[k] is what layer k reads.
        place = list(config.feature_layers).index(config.copied_layer) * config.feature_size
        head.fc.weight[:, place : place + config.feature_size].fill_diagonal_(1.0)
        head.embedding_projection.weight.zero_()
        last = getattr(target.get_decoder(), "norm", None)
        if last is not None and last.weight.shape == head.norm.weight.shape:
            head.norm.weight.copy_(last.weight)


def fill(head: Any, target: PreTrainedModel) -> None:
    """Copy the layers that the head's config names from `target`, and freeze them."""
    config = head.config
    sources = _layers(target, config.copied_layer, config.num_layers)
    states = [_weights(layer, target) for layer in sources]
    found = fingerprint(weight for state in states for weight in state.values())
    if config.fingerprint is not None and not same_fingerprint(found, config.fingerprint):
        raise ValueError(
            f"This head copies layer {config.copied_layer} of {config.target_name or 'another target'}, and "
            f"{target.config.name_or_path or type(target).__name__} has other weights there; load the target that "
            "the head was trained for."
        )
    for copy, source, state in zip(head.layers, sources, states, strict=True):
        try:
            _take_over(copy, source, state, config, target)
        except (TypeError, AttributeError, RuntimeError, LookupError, ValueError) as error:
            raise ValueError(
                f"A decoder layer of {type(target).__name__} cannot be copied into a head ({sentence(error)[:200]}); "
                "layers as those of Llama, Mistral, Qwen2 and Qwen3 can: leave copy_layer out."
            ) from error
        copy.requires_grad_(False)


def _layers(target: PreTrainedModel, first: int, count: int) -> list[nn.Module]:
    layers = getattr(target.get_decoder(), "layers", [])
    if not 0 <= first <= first + count <= len(layers):
        raise ValueError(
            f"{type(target).__name__} has {len(layers)} decoder layers; copy_layer and num_layers ask for "
            f"{first}..{first + count - 1}."
        )
    return list(layers[first : first + count])


def _weights(layer: nn.Module, target: PreTrainedModel) -> dict[str, Tensor]:
    """Return a target layer's weights under the names of a `DartLayer`."""
    state = {}
    for name, weight in layer.state_dict().items():
        if weight.is_meta or not weight.dtype.is_floating_point or weight.dtype.itemsize == 1:
            raise ValueError(
                f"The layers of this {type(target).__name__} are quantized or offloaded and cannot be copied; load it "
                "whole and in 16 or 32 bits, or leave copy_layer out."
            )
        first, _, rest = name.partition(".")
        state[f"{_NAMES.get(first, first)}.{rest}"] = weight
    return state


@torch.no_grad()
def _take_over(copy: Any, source: Any, state: dict[str, Tensor], config: DartConfig, target: PreTrainedModel) -> None:
    """Load the weights of a target's layer, and compare both on random input at positions that are far apart."""
    if strange := set(copy.state_dict()) ^ set(state):
        raise ValueError(f"there is no {min(strange)} in one of them")
    copy.to(next(iter(state.values())))  # nothing is rounded
    copy.load_state_dict(state)
    weight = copy.self_attn.q_proj.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 9, config.hidden_size, generator=generator).to(weight)
    positions = torch.tensor([[0, 1, 2, 3, 40, 41, 500, 1000, 1001]], device=weight.device)
    mask = torch.ones(9, 9, dtype=torch.bool, device=weight.device).tril()[None, None]
    ours = copy(x, x, rotation_at(positions, config, weight.dtype), mask, None)
    rotary, added = target.get_decoder().rotary_emb(x, positions), added_mask(mask, weight.dtype)
    with for_trees(target):
        theirs = source(x, attention_mask=added, position_ids=positions, position_embeddings=rotary)
    if not same(ours, theirs[0] if isinstance(theirs, tuple) else theirs):
        raise ValueError("it computes something else")
