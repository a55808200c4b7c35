"""What stands in a module's instance for its forward, while a call needs another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


class StandIn:
    """A forward that an instance has for a while: whoever put it there takes it away.

    Attributes:
        before: what the instance had there; None if its class's.
    """

    before: Any = None


def forward_before(forward: Any) -> Any:
    """What an instance has for `forward` of its own, whatever stands in for that now; None if nothing."""
    return forward.before if isinstance(forward, StandIn) else forward


@contextmanager
def standing_in(pairs: Sequence[tuple[nn.Module, StandIn]]) -> Iterator[None]:
    """Let forwards stand in modules meanwhile; where another call's do so already, those stay."""
    pairs = [(part, forward) for part, forward in pairs if "forward" not in vars(part)]
    for part, forward in pairs:
        vars(part)["forward"] = forward
    try:
        yield
    finally:
        for part, forward in pairs:
            if vars(part).get("forward") is forward:
                del vars(part)["forward"]
