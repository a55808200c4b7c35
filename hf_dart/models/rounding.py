"""How coarsely a target rounds: quantised modules may compute in fewer bits than its dtype has, or round activations.

Quantised weights are weights like any other. What runs on the way is another matter: bitsandbytes multiplies in 16 bits
whatever the dtype, LLM.int8 and dynamic schemes round activations to 8 bits. Logits then carry roundings of that size,
and stock's own text may part at near-ties of that size between batches. Activations that are scaled by the largest
number of a whole call are worse: the tokens of a call decide how the others are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.models.devices import device_of
from hf_dart.models.processes import highest
from hf_dart.models.stand_in import forward_before
from hf_dart.models.support import parts_of

_ROWS = 33  # more than 32, from which on some kernels change
# What is no more than a module's own roundings, and than those of sums in float32.
_OWN, _SUMS = 4, 64
# What no rounding comes to: 0.02 are usual for activations of 8 bits, and up to 0.4 for those of 4. Functions that are
# not linear, such as an activation within the module, have more.
_FUNCTION = 0.5


def rounding_of(model: PreTrainedModel) -> torch.dtype:
    """The dtype whose roundings logits of `model` carry: its own, or bfloat16 where a module rounds more coarsely."""
    coarse = any(_coarse(part, _inputs(part, model)) for part in _quantised(model))
    return torch.bfloat16 if coarse else model.dtype


def narrow_dtype(numbers: Tensor) -> torch.dtype | None:
    """The dtype of 16 bits of which all `numbers` are, whatever dtype they are kept in; None if there is none.

    Autocast multiplies in 16 bits, and accelerate's hands its results on in float32.
    """
    narrow = (torch.bfloat16, torch.float16)
    return next((dtype for dtype in narrow if torch.equal(numbers.to(dtype).to(numbers), numbers)), None)


def refuse_shared_scales(model: PreTrainedModel) -> None:
    """Raise where the result of a token depends on the tokens beside it, by more than a module's own rounding.

    Raises:
        ValueError: the message names the kind of module.
    """
    for part in _quantised(model):
        x = _inputs(part, model)
        # As far apart as the dtype allows: floating point of 8 bits has a range of its own.
        quiet, loud = (-8, 12) if x.dtype == torch.float16 else (0, 40)
        x = x * 2.0**quiet
        louder = torch.cat([x[:, :1], x[:, 1:] * 2.0 ** (loud - quiet)], dim=1)
        found, beside = _run(part, x), _run(part, louder)
        if found is None or beside is None:
            continue
        change = _share(found[:, :1] - beside[:, :1], found[:, :1])
        change, allowed = highest(model, change, _OWN * max(_rounding(part, x), torch.finfo(x.dtype).eps))
        if not change <= allowed:
            raise ValueError(
                f"{type(model).__name__} rounds activations by the largest of all tokens that its "
                f"{type(part).__name__} modules are given at once, so that the tokens of a tree would change each "
                "other's logits; load it with a scale for each token or with quantised weights alone, or call generate "
                "without assistant=."
            )


def _coarse(part: nn.Module, x: Tensor) -> bool:
    """Does a module round more coarsely than its inputs are?"""
    eps = torch.finfo(x.dtype).eps
    least = 2 * eps if x.dtype == torch.float16 else _SUMS * max(eps, 2.0**-23)
    return least < _rounding(part, x) < _FUNCTION


def _rounding(part: nn.Module, x: Tensor) -> float:
    """How far a module is from f(x + y) + f(x - y) = 2 f(x), as a share of the largest; 0 if it cannot be run."""
    y = x.roll(1, dims=-1)  # both are of so few bits that sums of them are exact
    found = [_run(part, one) for one in (x, x + y, x - y)]
    if any(one is None for one in found):
        return 0.0
    middle, above, below = (one for one in found if one is not None)
    return _share(above + below - 2 * middle, middle)


def _quantised(model: nn.Module) -> Iterator[nn.Module]:
    """One of each kind of linear module that is not PyTorch's own over a plain weight.

    compressed-tensors leaves them PyTorch's own, with a forward in the instance that rounds before and after.
    """
    seen = set()
    for part in parts_of(model):
        weight = part._parameters.get("weight", getattr(part, "weight", None))
        forward = forward_before(vars(part).get("forward"))
        plain = type(part) is nn.Linear and type(weight) in (nn.Parameter, Tensor)
        changed = forward is not None or part._forward_pre_hooks or part._forward_hooks
        width = getattr(part, "in_features", None)
        if (plain and not changed) or not isinstance(width, int) or part._modules:
            continue
        kind = (type(part), type(weight), _settings(part))
        if kind not in seen:
            seen.add(kind)
            yield part


def _settings(part: nn.Module) -> tuple[str, ...]:
    """How a module is told to compute: what it has of simple attributes, but its shape, and schemes in Pydantic."""
    return tuple(
        f"{name}={value}"
        for name, value in vars(part).items()
        if name not in ("in_features", "out_features")
        and (isinstance(value, (str, int, float, tuple, list, torch.dtype)) or hasattr(value, "model_fields_set"))
    )


def _inputs(part: Any, model: PreTrainedModel) -> Tensor:
    """[1, 33, in] random numbers of 7 bits, in the dtype that the module computes in."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _ROWS, part.in_features, generator=generator).mul_(16).round_().clamp_(-64, 64).div_(16)
    held = (getattr(part, name, None) for name in ("weight", "bias"))
    # Numbers of 8 bits are what activations are rounded to within, not what they come in.
    dtypes = (one.dtype for one in held if isinstance(one, Tensor) and one.is_floating_point())
    dtype = next((dtype for dtype in dtypes if dtype.itemsize > 1), None)
    return x.to(device_of(part), dtype or model.dtype)


@torch.no_grad()
def _run(part: nn.Module, x: Tensor) -> Tensor | None:
    """What a module makes of [1, 33, in], in float64; None if it takes other inputs."""
    try:
        return part(x.clone()).cpu().double()
    except Exception:  # unknown code may fail in any way at all
        return None


def _share(difference: Tensor, whole: Tensor) -> float:
    return float(difference.abs().max() / whole.abs().max().clamp(min=1e-30))
