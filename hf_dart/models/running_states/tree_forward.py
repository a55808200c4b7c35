"""The forward that a module with running states has for a while: the one that verifies a tree.

It stands in these instances alone, and acts on a `StatefulCache` only, which nobody else has: other calls of the model,
in other threads too, do not notice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from hf_dart.cache.states import StatefulCache, StateSlot


@dataclass(frozen=True)
class Mixer:
    """A module that keeps running states, such as a linear attention.

    Attributes:
        module: what runs.
        slots: where the cache keeps its states.
        form: how it takes trees.
    """

    module: nn.Module
    slots: tuple[StateSlot, ...]
    form: Form

    @cached_property
    def tree_forward(self) -> TreeForward:
        """The forward of the module while trees are verified: always the same, for which compiled code looks."""
        return TreeForward(self)


Form = Callable[[Mixer, Callable[..., Any], StatefulCache, tuple[Any, ...], dict[str, Any]], Any]
"""A way to run a mixer over the nodes of a tree, with the arguments of `by_levels`."""


class TreeForward:
    """A module's forward while trees are verified, for which it stands in its instance.

    Attributes:
        users: calls that verify trees at this moment, in all threads.
        before: what the instance had there; None if its class's.
    """

    def __init__(self, mixer: Mixer) -> None:
        self.users = 0
        self._mixer = mixer
        self.look()

    def look(self) -> None:
        """Note the forward that the module has now."""
        self.before, self._forward = vars(self._mixer.module).get("forward"), self._mixer.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        cache = next((part for part in given if isinstance(part, StatefulCache)), None)
        if cache is None:
            return self._forward(*args, **kwargs)
        return self._mixer.form(self._mixer, self._forward, cache, args, kwargs)


def forward_before(module: nn.Module) -> Any:
    """Return the `forward` that an instance has of its own, whatever stands in for it now; None if nothing."""
    forward = vars(module).get("forward")
    return forward.before if isinstance(forward, TreeForward) else forward


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
                members = vars(mixer.module)
                if not isinstance(members.get("forward"), TreeForward):
                    mixer.tree_forward.look()
                    members["forward"] = mixer.tree_forward
                members["forward"].users += 1
                entered.append(mixer)
        yield
    finally:
        for mixer in entered:
            with _INSTALLING:
                ours = vars(mixer.module)["forward"]
                ours.users -= 1
                if ours.users == 0:
                    del vars(mixer.module)["forward"]
                    if ours.before is not None:
                        vars(mixer.module)["forward"] = ours.before
