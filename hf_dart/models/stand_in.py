"""What stands in a module's instance for its forward, while a call needs another one."""

from __future__ import annotations

from typing import Any


class StandIn:
    """A forward that an instance has for a while: whoever put it there takes it away.

    Attributes:
        before: what the instance had there; None if its class's.
    """

    before: Any = None


def forward_before(forward: Any) -> Any:
    """What an instance has for `forward` of its own, whatever stands in for that now; None if nothing."""
    return forward.before if isinstance(forward, StandIn) else forward
