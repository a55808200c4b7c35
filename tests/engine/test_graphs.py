"""Calls that cannot be captured are told before a capture is begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dart.engine.graphs import NoHost

pytestmark = pytest.mark.filterwarnings("error::UserWarning")


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.__setitem__(x > 0, 1.0),
        lambda x: torch.equal(x, x),
        lambda x: bool((x > 0).any()),
        lambda x: torch.unique(x),
    ],
    ids=["item", "nonzero", "mask", "masked", "equal", "bool", "unique"],
)
def test_what_asks_the_host(asks: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError, match="asks the host"), NoHost():
        asks(torch.arange(4.0))


@torch.library.custom_op("hf_dart_tests::shifted", mutates_args=(), schema="(Tensor x) -> Tensor")
def shifted(x: Tensor) -> Tensor:
    return x + x.max().item()


@torch.library.custom_op("hf_dart_tests::bounded", mutates_args=(), schema="(Tensor x) -> Tensor")
def bounded(x: Tensor) -> Tensor:
    return x.clamp(max=1)


def test_custom_operations() -> None:
    """By what they are made of."""
    x = torch.arange(4.0)
    with pytest.raises(RuntimeError, match=r"_local_scalar_dense.* asks the host"), NoHost():
        shifted(x)
    with NoHost():
        found = bounded(x)
    assert found.tolist() == [0, 1, 1, 1]


def test_what_does_not() -> None:
    x, places = torch.arange(12.0).view(3, 4), torch.tensor([2, 0])
    with NoHost():
        x[places, places] = x[places, places] + 1
        x[:, 0] = 2
        found = torch.where(x > 3, x, -1.0).sort(-1).values.cumsum(-1)
        x.copy_(found)
    assert x[0, 0] == -3 or x.isfinite().all()
