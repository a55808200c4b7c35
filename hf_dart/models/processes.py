"""Several processes that hold a target together (`docs/exactness.md`): all have to verify the same trees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, distributed, nn

from hf_dart.models.devices import device_of, generator_state, is_part
from hf_dart.trees.config import TreeConfig


def alone() -> bool:
    """Tell whether this is the only process."""
    return not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1


def group_of(model: nn.Module) -> Any:
    """Return the group of processes that hold the weights of a model together; None if this one holds all of them."""
    if alone():
        return None
    weights: Iterator[Any] = model.parameters()
    mesh = next((weight.device_mesh for weight in weights if is_part(weight)), None)
    return None if mesh is None else mesh.get_group("tp" if mesh.ndim > 1 else None)


def is_shared(model: Any) -> bool:
    """Tell whether several processes hold parts of a model, by its weights and the plan that it was loaded by."""
    return not alone() and (getattr(model, "_device_mesh", None) is not None or group_of(model) is not None)


def highest(model: Any, *numbers: float) -> list[float]:
    """Return each number, or its highest value if several processes hold the model, which may differ by rounding."""
    group = group_of(model)
    if group is None:
        return [*numbers]
    found = torch.tensor(numbers, dtype=torch.float64, device=device_of(model.get_input_embeddings()))
    distributed.all_reduce(found, distributed.ReduceOp.MAX, group)
    return found.tolist()


def refuse_different_calls(model: Any, input_ids: Tensor, generation_config: Any, tree_config: TreeConfig) -> None:
    """Raise, in each process that holds a part of the model, if prompts, options or generators of the calls differ."""
    if group_of(model) is None:
        return
    options = {name: one for name, one in vars(generation_config).items() if isinstance(one, int | float | str | list)}
    facts = [input_ids.cpu().numpy().tobytes(), repr((sorted(options.items()), tree_config)).encode()]
    if generation_config.do_sample:
        facts.append(generator_state(input_ids.device).numpy().tobytes())
    known = crc32(b"".join(facts))
    most, least = highest(model, known, -known)
    if most != -least:
        raise ValueError(
            "The processes that hold this target together call generate with different prompts, options or generator "
            "states; give all of them the same, and before sampling call torch.manual_seed with one number in each."
        )
