"""Projections of one input as one matrix product: q, k and v of an attention, gate and up of an MLP.

A round's products are bound by reading weights, and each has a start and an end in which little is read; k and v of a
model with few key heads are hardly more than those. Here the weights of a group come to lie in one storage, one after
another, and each parameter becomes a view of its rows: the same numbers with the same shape and strides, so that
training, saving, adapters and stock's own `generate` know nothing of it. Captured rounds alone multiply by the whole.

The same product may be rounded differently then, as by any other kernel: `hf_dart.engine.trial` says how far.
Groups of which one is not a plain `nn.Linear` of its own weights (an adapter's, quantised, tied, parametrized) stay as
they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dart.target.stand_in import StandIn, forward_before, standing_in

_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_here: ContextVar[bool] = ContextVar("_here", default=False)


class FusedLinears:
    """Linear layers of one input, whose weights lie one after another.

    Attributes:
        weight: [sum out_i, in] of all of them.
        bias: [sum out_i], or None.
        sizes: out_i.

    Args:
        linears: [out_i, in] each; the first is called first, with the input of all.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = tuple(linears)
        self.forwards = [_Forward(self, place) for place in range(len(linears))]
        self.sizes = [linear.out_features for linear in linears]
        self.weight = _whole([linear.weight for linear in linears])
        self.bias = None if linears[0].bias is None else _whole([linear.bias for linear in linears])
        # Of what and what was computed last: one tuple, so that no thread sees an input with another's outputs.
        self._last: tuple[Tensor | None, tuple[Tensor, ...]] = (None, ())

    def __call__(self, place: int, x: Tensor) -> Tensor:
        """What the layer at `place` makes of x [..., in]: computed with the first one, kept for the others."""
        seen, outputs = self._last
        if place == 0:
            outputs = F.linear(x, self.weight, self.bias).split(self.sizes, -1)
            self._last = x, outputs
        elif seen is not x:  # not what the first one saw
            linear = self.linears[place]
            return F.linear(x, linear.weight, linear.bias)
        if place == len(self.linears) - 1:
            self._last = None, ()
        return outputs[place]


class _Forward(StandIn):
    """`forward` of one of the layers: all of them at once within `fused`, in its thread, and its own elsewhere."""

    def __init__(self, whole: FusedLinears, place: int) -> None:
        self._whole, self._place = whole, place

    def __call__(self, x: Tensor) -> Tensor:
        # What is compiled is a round of ours.
        if torch.compiler.is_compiling() or _here.get():
            return self._whole(self._place, x)
        linear = self._whole.linears[self._place]
        return F.linear(x, linear.weight, linear.bias)


def fuse(model: nn.Module) -> list[FusedLinears]:
    """Let weights of `model` that are multiplied by one input lie in one storage; those that do so already stay there.

    One group is copied at a time. `separate` undoes it.
    """
    weights = (weight for _, weight in model.named_parameters(remove_duplicate=False))
    # Those of other types, quantised ones, may have no storage that can be asked.
    users = Counter(weight.untyped_storage().data_ptr() for weight in weights if type(weight) is nn.Parameter)
    found = []
    for linears in _groups(model):
        joined = _joined(linears)
        if not joined and any(users[storage] > 1 for storage in _storages(linears)):
            continue  # tied
        if not joined:
            _join([linear.weight for linear in linears])
            if linears[0].bias is not None:
                _join([linear.bias for linear in linears])
        found.append(FusedLinears(linears))
    return found


@torch.inference_mode(False)  # what is made in that mode could not be trained
def separate(model: nn.Module) -> None:
    """Give each parameter that `fuse` moved a storage of its own again."""
    for linears in _groups(model):
        if _joined(linears):
            for linear in linears:
                for part in (linear.weight, linear.bias):
                    if part is not None:
                        part.data = part.data.clone()


@contextmanager
def fused(groups: Sequence[FusedLinears]) -> Iterator[None]:
    """Multiply by the whole of each group meanwhile, in this thread."""
    token = _here.set(True)
    try:
        with standing_in([pair for group in groups for pair in zip(group.linears, group.forwards, strict=True)]):
            yield
    finally:
        _here.reset(token)


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Plain linear layers that stand side by side under the names of a group, of one width, dtype and device."""
    for parent in model.modules():
        for names in _NAMES:
            linears: list[Any] = [parent._modules.get(name) for name in names]
            if any(type(linear) is not nn.Linear for linear in linears):
                continue
            if any(forward_before(vars(linear).get("forward")) is not None for linear in linears):
                continue
            kinds = {
                (linear.in_features, linear.bias is None, *_kinds(linear.weight), *_kinds(linear.bias))
                for linear in linears
            }
            if len(kinds) == 1 and None not in next(iter(kinds)):
                yield linears


def _kinds(part: Tensor | None) -> tuple[Any, ...]:
    """What weights or biases have to have in common; with a None where they are to be left alone."""
    if part is None:
        return ()
    plain = type(part) is nn.Parameter and part.is_contiguous() and not part.is_inference()
    return part.dtype, part.device, True if plain and part.device.type != "meta" else None


def _storages(linears: Sequence[nn.Linear]) -> list[int]:
    parts = [part for linear in linears for part in (linear.weight, linear.bias) if part is not None]
    return [part.untyped_storage().data_ptr() for part in parts]


def _joined(linears: Sequence[nn.Linear]) -> bool:
    """Do they lie one after another in one storage?"""
    return all(
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.data_ptr() + first.nbytes == second.data_ptr()
        for one, other in pairwise(linears)
        for first, second in [(one.weight, other.weight), (one.bias, other.bias)]
        if first is not None and second is not None
    )


@torch.no_grad()
def _join(parts: Sequence[Tensor]) -> None:
    """Move tensors [out_i, ...] into one storage."""
    with torch.inference_mode(False):
        whole = torch.cat([part.detach() for part in parts])
    for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = rows


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """[sum out_i, ...] of tensors that lie one after another."""
    first = parts[0].detach()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
