"""`EngineConfig`: how parts of a round are compiled; `compiled` does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch


@dataclass(frozen=True)
class EngineConfig:
    """Options for compiling and capturing parts of a round.

    Args:
        backend: of `torch.compile`; None compiles nothing, which starts at once. On a GPU each part is one CUDA graph
            either way.
        first_tier: T of the shortest tier, in tokens; each is twice as long as the one before.

    Raises:
        ValueError: a field is out of range.
    """

    backend: str | None = "inductor"
    first_tier: int = 512

    def __post_init__(self) -> None:
        if self.first_tier < 8 or self.first_tier % 8:
            raise ValueError(f"first_tier is {self.first_tier}; give a multiple of 8 tokens.")


def compiled(part: Any, config: EngineConfig) -> Callable[..., Any]:
    """Compile a method as one graph; return it as it is where nothing is to be compiled."""
    if config.backend is None:
        return part
    # Dynamo limits compilations per code object: one code object for all tiers would soon exceed the limit.
    code, name = part.__func__.__code__.replace(), part.__name__
    own = FunctionType(code, part.__func__.__globals__, name, part.__func__.__defaults__, part.__func__.__closure__)
    whole = MethodType(own, part.__self__)
    # `engine.signature` says when parts are to be compiled again; guards would look at every weight in every round.
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    return torch.compile(whole, fullgraph=True, backend=config.backend, options=options, dynamic=False)
