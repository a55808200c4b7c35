"""Forwards that stand in the instances of some modules for a while, as calls need them.

Calls of the model in other threads, and by stock, go on to the forward that the module had.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import nn

# An interruption may leave it locked, for this thread alone.
_INSTALLING = threading.RLock()


@dataclass(eq=False)
class StandIn:
    """A callable that stands for the forward of a module, which is called as `self._forward`."""

    module: nn.Module
    # Threads that need it at this moment, once for each call, while it stands in the module's instance.
    users: list[int] = field(default_factory=list, init=False)
    before: Any = field(default=None, init=False)  # what the instance had there; None if its class's

    def __post_init__(self) -> None:
        self._forward = self.module.forward

    def install(self) -> None:
        """Stand for the forward that the module has now."""
        members = vars(self.module)
        self.before, self._forward = members.get("forward"), self.module.forward
        members["forward"] = self

    def remove(self) -> None:
        """Give the module the forward that it had."""
        del vars(self.module)["forward"]
        if self.before is not None:
            vars(self.module)["forward"] = self.before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the forward of a copy of the module, of which no call is under way."""
        if self.before is not None:
            return copy.deepcopy(self.before, memo)
        module = copy.deepcopy(self.module, memo)
        return MethodType(type(module).forward, module)


def forward_before(module: nn.Module) -> Any:
    """Return the `forward` that an instance has of its own, whatever stands in for it now; None if nothing."""
    forward = vars(module).get("forward")
    return forward.before if isinstance(forward, StandIn) else forward


@contextmanager
def standing_in(forwards: Sequence[StandIn]) -> Iterator[None]:
    """Let forwards stand in for those of their modules, or what stands there already for another call."""
    entered: list[StandIn] = []
    thread = threading.get_ident()
    try:
        try:
            with _INSTALLING:
                for forward in forwards:
                    there = vars(forward.module).get("forward")
                    standing = there if isinstance(there, StandIn) else forward
                    entered.append(standing)  # first, so that `_leave` finds it
                    standing.users.append(thread)
                    if standing is not there:
                        standing.install()
            yield
        finally:
            _leave(entered, thread)
    finally:
        _leave(entered, thread)  # what an interruption of the first has left


def _leave(entered: list[StandIn], thread: int) -> None:
    """Give modules their forwards back."""
    with _INSTALLING:
        while entered:
            standing = entered[-1]
            if thread in standing.users:
                standing.users.remove(thread)
            if not standing.users and vars(standing.module).get("forward") is standing:
                standing.remove()
            entered.pop()
