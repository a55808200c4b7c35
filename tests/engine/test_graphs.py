"""What cannot be captured is told before a capture is begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import Tensor

from hf_dart.engine.graphs import Launch, NoHost, Pool

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


class _Cuda:
    """As much of a device as a capture sees; one that cannot be ended leaves its stream behind."""

    def __init__(self) -> None:
        self.before = Mock()
        self.stream_now: Any = self.before

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    def graph(self, graph: Any, *, stream: Any, **options: Any) -> Any:
        context = MagicMock()
        context.__enter__.side_effect = lambda *args: self.set_stream(stream)
        context.__exit__.side_effect = RuntimeError("operation failed due to a previous error during capture")
        return context

    def set_stream(self, stream: Any) -> None:
        self.stream_now = stream


def test_a_capture_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread goes on where it was."""
    cuda = _Cuda()
    for name in ("stream", "graph", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: cuda.stream_now)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with pytest.raises(RuntimeError, match="during capture"):
        Launch(lambda: None, torch.device("cuda"), Pool(None, Mock()))
    assert cuda.stream_now is cuda.before


def test_what_does_not() -> None:
    x, places = torch.arange(12.0).view(3, 4), torch.tensor([2, 0])
    with NoHost():
        x[places, places] = x[places, places] + 1
        x[:, 0] = 2
        found = torch.where(x > 3, x, -1.0).sort(-1).values.cumsum(-1)
        x.copy_(found)
    assert x[0, 0] == -3 or x.isfinite().all()
