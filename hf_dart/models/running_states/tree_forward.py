"""The forward that a module with running states has for a while: the one that verifies a tree.

It stands in these instances alone, and acts on a `StatefulCache` only, which nobody else has: other calls of the model,
in other threads too, do not notice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hf_dart.cache.states import StatefulCache, StateSlot


@dataclass(eq=False)
class Mixer:
    """A module that keeps running states, such as a linear attention; called, it is the module's forward for trees.

    Attributes:
        module: what runs.
        slots: where the cache keeps its states.
        form: how it takes trees.
        users: calls that verify trees at this moment, in all threads, while it stands in the module's instance.
        before: what the instance had there; None if its class's.
    """

    module: nn.Module
    slots: tuple[StateSlot, ...]
    form: Form
    users: int = field(default=0, init=False)
    before: Any = field(default=None, init=False)

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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        cache = next((part for part in given if isinstance(part, StatefulCache)), None)
        if cache is None:
            return self._forward(*args, **kwargs)
        return self.form(self, self._forward, cache, args, kwargs)


Form = Callable[[Mixer, Callable[..., Any], StatefulCache, tuple[Any, ...], dict[str, Any]], Any]
"""A way to run a mixer over the nodes of a tree, with the arguments of `by_levels`."""


def forward_before(module: nn.Module) -> Any:
    """Return the `forward` that an instance has of its own, whatever stands in for it now; None if nothing."""
    forward = vars(module).get("forward")
    return forward.before if isinstance(forward, Mixer) else forward


# An interruption may leave it locked, for this thread alone.
_INSTALLING = threading.RLock()


@contextmanager
def tree_forwards(mixers: Sequence[Mixer]) -> Iterator[None]:
    """Let the mixers take trees for a while: a forward of their model over a `StatefulCache` gives what nodes need.

    Which tree is said by `RunningStates.begin`.
    """
    entered: list[Mixer] = []
    try:
        for mixer in mixers:
            with _INSTALLING:
                if not isinstance(vars(mixer.module).get("forward"), Mixer):
                    mixer.install()
                standing = vars(mixer.module)["forward"]  # another call's, perhaps
                standing.users += 1
                entered.append(standing)
        yield
    finally:
        for mixer in entered:
            with _INSTALLING:
                mixer.users -= 1
                if mixer.users == 0:
                    mixer.remove()
