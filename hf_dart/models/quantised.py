"""Quantised modules of a target: how coarsely they round, and whether tokens of one call share their scales.

Activations that are scaled by the largest number of a whole call are refused: the tokens of a call decide how the
others are rounded. `docs/exactness.md` says what other roundings change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_dart.models.devices import device_of
from hf_dart.models.forwards import forward_before
from hf_dart.models.processes import highest
from hf_dart.models.support import parts_of
from hf_dart.models.tolerance import allowance, difference

_ROWS = 33  # some kernels change above 32 rows


def rounding_of(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype to which logits of `model` are rounded: its own, or bfloat16 if a module rounds coarser."""
    coarse = any(_coarse(part, _inputs(part, model)) for part in _quantised(model))
    return torch.bfloat16 if coarse else model.dtype


def refuse_shared_scales(model: PreTrainedModel) -> None:
    """Raise where a module's output for a token vanishes next to tokens of much larger numbers."""
    for part in _quantised(model):
        x = _inputs(part, model)
        # As far apart as the dtype allows: floating point of 8 bits has a range of its own.
        quiet, loud = (-8, 12) if x.dtype == torch.float16 else (0, 40)
        x = x * 2.0**quiet
        alone = _run(part, x)
        together = _run(part, torch.cat([x[:, :1], x[:, 1:] * 2.0 ** (loud - quiet)], dim=1))
        if alone is None or together is None:
            continue
        (change,) = highest(model, difference(together[:, :1], alone[:, :1]))
        if not change <= allowance(torch.bfloat16):
            raise ValueError(
                f"{type(model).__name__} rounds activations by the largest of all tokens that its "
                f"{type(part).__name__} modules are given at once, so that the tokens of a tree would change each "
                "other's logits; load it with a scale for each token or with quantised weights alone, or call generate "
                "without assistant=."
            )


def _coarse(part: nn.Module, x: Tensor) -> bool:
    """Return True if f(x + y) + f(x - y) = 2 f(x) fails for a linear module by more than its input dtype's rounding."""
    y = x.roll(1, dims=-1)  # both have so few bits that their sums are exact
    middle, above, below = (_run(part, one) for one in (x, x + y, x - y))
    if middle is None or above is None or below is None:
        return False
    return 4 * difference((above + below) / 2, middle) > allowance(x.dtype)


def _quantised(model: nn.Module) -> Iterator[nn.Module]:
    """One of each kind of linear module that is not PyTorch's own over a plain weight.

    compressed-tensors leaves them PyTorch's own, with a forward in the instance that rounds before and after, as a
    scheme in Pydantic says.
    """
    seen = set()
    for part in parts_of(model):
        weight = part._parameters.get("weight", getattr(part, "weight", None))
        forward = forward_before(part)
        plain = type(part) is nn.Linear and type(weight) in (nn.Parameter, Tensor)
        changed = forward is not None or part._forward_pre_hooks or part._forward_hooks
        if (plain and not changed) or not isinstance(getattr(part, "in_features", None), int) or part._modules:
            continue
        told = [(name, value) for name, value in vars(part).items() if name not in ("in_features", "out_features")]
        simple = (str, int, float, tuple, list, torch.dtype)
        told = [one for one in told if isinstance(one[1], simple) or hasattr(one[1], "model_fields_set")]
        kind = (type(part), type(weight), str(told))
        if kind not in seen:
            seen.add(kind)
            yield part


def _inputs(part: Any, model: PreTrainedModel) -> Tensor:
    """[1, 33, in] random numbers of 7 bits, in the dtype that the module computes in."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _ROWS, part.in_features, generator=generator).mul_(16).round_().clamp_(-64, 64).div_(16)
    held = (getattr(part, name, None) for name in ("weight", "bias"))
    # 8 bits are what activations are rounded to inside, not the dtype in which they are passed.
    dtypes = (one.dtype for one in held if isinstance(one, Tensor) and one.is_floating_point())
    dtype = next((dtype for dtype in dtypes if dtype.itemsize > 1), None)
    return x.to(device_of(part), dtype or model.dtype)


@torch.no_grad()
def _run(part: nn.Module, x: Tensor) -> Tensor | None:
    """Return the outputs of a module for [1, 33, in], in float64; None if it takes other inputs."""
    try:
        return part(x.clone()).cpu().double()
    except Exception:  # unknown code may fail in any way at all
        return None
