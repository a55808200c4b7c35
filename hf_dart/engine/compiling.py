"""`torch.compile` of parts of a round."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import torch

Part = TypeVar("Part")


class Backend(NamedTuple):
    """`backend` and `mode` of `torch.compile`."""

    name: str | None
    mode: str | None = None


def compiled(part: Callable[..., Part], backend: Backend | str | None) -> Callable[..., Part]:
    """A function or method as one graph of `backend`; as it is where that is None."""
    backend, mode = backend if isinstance(backend, Backend) else (backend, None)
    if backend is None:
        return part
    # Dynamo counts compilations per code object: with one for all rounds, they would soon be too many.
    plain: Any = part.__func__ if isinstance(part, MethodType) else part
    own = FunctionType(
        plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    own.__kwdefaults__ = plain.__kwdefaults__
    whole = MethodType(own, part.__self__) if isinstance(part, MethodType) else own
    return torch.compile(whole, fullgraph=True, backend=backend, mode=mode, dynamic=False)
